"""What README and the pages of docs/ show runs: their code, with small names given."""

import importlib
import pathlib
import re
import sys

import jax
import pytest
from jax.sharding import PartitionSpec as P

from tests import helpers
from tests.helpers import snippets


ROOT = pathlib.Path(__file__).parent.parent
BLOCK = re.compile(r"^(<!-- test: .*? -->\n)?```python\n(.*?)^```$", re.M | re.S)
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if "_build" not in path.parts
}
WITH_CODE = [name for name, text in PAGES.items() if BLOCK.search(text)]

# Pages whose parameters are not small.
OF_LARGE = ("which", "rows", "dense", "systems/ok_topk", "systems/spardl")
OTHERS = {f"docs/{page}.md": snippets.large for page in OF_LARGE}
# What a note in front of a block says of it, by what the notes say.
NOTED = {
    "names of two axes": lambda names, block: (names | snippets.two_axes(), block),
    # What there would have to be a GPU for is run as a test runs it.
    "interpreted": lambda names, block: (
        names,
        block.replace('use_kernels("pallas")', 'use_kernels("pallas", interpret=True)'),
    ),
}
# They train, several times, and what they show is tested by default elsewhere.
LONG = {"docs/systems/embrace.md", "docs/which.md"}


@pytest.mark.parametrize(
    "page", [*sorted({*WITH_CODE} - LONG), *helpers.slow(*sorted(LONG))]
)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # one saves a plan
    names = snippets.given() | OTHERS.get(page, dict)()
    for note, block in BLOCK.findall(PAGES[page]):
        if note:
            names, block = NOTED[note[len("<!-- test: ") : -len(" -->\n")]](names, block)
        try:
            exec(compile(block, f"a block of {page}", "exec"), names)
        except Exception as error:
            error.add_note(f"In this block of {page}:\n{block}")
            raise


def test_pages_with_code_are_found():
    assert {"README.md", "docs/start.md", "docs/rows.md", *LONG} <= {*WITH_CODE}
    assert len(WITH_CODE) >= 12


def test_readme_fits_a_screen_or_two():
    assert len(PAGES["README.md"].splitlines()) <= 110


@pytest.mark.parametrize("page", ["README.md", "docs/start.md"])
def test_the_change_to_a_script(page):
    """The lines of the diff that stand in the changed script."""
    diff = re.search(r"^```diff\n(.*?)^```$", PAGES[page], re.M | re.S)
    assert diff
    lines = diff[1].splitlines()
    changed = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    names = snippets.given()
    exec(changed, names)
    params, tx = names["params"], names["tx"]
    step = jax.shard_map(
        names["train_step"],
        mesh=names["mesh"],
        in_specs=(P(), P(), P("data")),
        out_specs=P(),
    )
    jax.eval_shape(step, params, tx.init(params), names["batch"])


LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.mark.parametrize("page", sorted(PAGES))
def test_a_page_links_to_what_is_there(page):
    folder = (ROOT / page).parent
    for link in LINK.findall(PAGES[page]):
        path, _, heading = link.partition("#")
        if "://" in link or not path:
            continue
        assert (folder / path).exists(), link
        if heading:
            titles = re.findall(r"^#+ (.*)$", (folder / path).read_text(), re.M)
            anchors = [re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles]
            assert heading in anchors, (link, anchors)


@pytest.fixture
def scripts(monkeypatch):
    """Imports a script of docs/, which is no package."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    yield importlib.import_module
    for name in ("performance", "gains", "recorded", "pictures"):
        sys.modules.pop(name, None)


def test_figures_of_pages_are_made_from_results(scripts):
    """`python docs/performance.py` writes what is there."""
    made = scripts("performance")
    assert PAGES["docs/performance.md"] == made.page()
    made = scripts("gains")
    assert PAGES["README.md"] == made.readme(PAGES["README.md"])
    assert "**" in made.gains()
    assert made.gains() in PAGES["README.md"]


def test_pictures_are_made_by_their_script(scripts):
    """`python docs/pictures.py` writes what is there."""
    made = {draw.__name__: draw().svg() for draw in scripts("pictures").PICTURES}
    drawn = (ROOT / "docs" / "pictures").glob("*.svg")
    assert made == {path.stem: path.read_text() for path in drawn}
