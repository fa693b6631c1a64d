"""Tutorials are notebooks that the build of the documentation runs: what they promise."""

import re

import pytest

from tests.test_readme import PAGES, ROOT


TUTORIALS = sorted(
    name
    for name in PAGES
    if name.startswith("docs/tutorials/") and not name.endswith("/index.md")
)


def test_there_are_tutorials_and_the_index_lists_them():
    index = PAGES["docs/tutorials/index.md"]
    names = [name.rsplit("/", 1)[1] for name in TUTORIALS]
    assert len(names) >= 5
    assert sorted(re.findall(r"\]\((\w+\.md)\)", index)) == names
    listed = re.search(r"```\{toctree\}\n.*?\n\n(.*?)```", index, re.S)
    assert listed is not None
    assert sorted(f"{name}.md" for name in listed[1].split()) == names


@pytest.mark.parametrize("name", TUTORIALS)
def test_it_is_run_and_says_what_the_reader_will_have(name):
    text = PAGES[name]
    assert text.startswith("---\nfile_format: mystnb\n")
    assert "```{code-cell} ipython3\n" in text
    assert "\n**At the end** you have " in text
    assert "\n**Next:** " in text
    files = re.findall(r"`(examples/\w+(?:\.py)?)`", text)
    assert files
    assert all((ROOT / file).exists() for file in files)
