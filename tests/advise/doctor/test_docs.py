"""The Python in the pages about jobs runs, and their lines name what is there."""

import pathlib
import re

import pytest

from sparsejax import __main__ as command


ROOT = pathlib.Path(__file__).parents[3]
PAGES = ("doctor", "several_hosts")


def blocks(page, kind):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    return re.findall(rf"^ *```{kind}\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs(page):
    code = "\n".join(blocks(page, "python"))
    names = {}
    exec(compile(code, f"docs/{page}.md", "exec"), names)
    assert "report" in names or "join" in names


@pytest.mark.parametrize("page", PAGES)
def test_the_lines_of_a_page_name_files_and_options_that_are_there(page, capsys):
    lines = "\n".join(blocks(page, "console"))
    for path in re.findall(r"examples/\S+", lines):
        assert (ROOT / path).exists(), path
    for module in re.findall(r"examples(?:\.\w+)+", lines):
        assert ROOT.joinpath(*module.split(".")).with_suffix(".py").exists(), module
    with pytest.raises(SystemExit):
        command.main(["doctor", "--help"])
    known = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
    for line in re.findall(r"sparsejax doctor(?:\\\n|.)*", lines):
        assert set(re.findall(r"--[\w-]+", line)) <= known, line
