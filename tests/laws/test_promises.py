"""Pages and tests agree: what a page promises names the test that fails where it is not so.

`promises.toml` lists sentences of the pages by how they begin, each with its tests. Whoever
changes such a sentence, or such a test, finds the other one there. Read with `ast`, so no
test is run.
"""

import ast
import functools
import pathlib
import tomllib

import pytest


ROOT = pathlib.Path(__file__).parents[2]
LISTED = tomllib.loads((ROOT / "tests" / "laws" / "promises.toml").read_text())
# Their figures and tables are made from records.
MADE = {"docs/performance.md", "docs/performance_tables.md", "docs/faults.md"}


def text_of(page):
    """A page without line breaks."""
    return " ".join((ROOT / page).read_text().split())


@functools.cache
def names_in(file):
    """The names of the tests in a file, by the file's path without its ending."""
    path = ROOT / "tests" / f"{file}.py"
    if not path.exists():
        return frozenset()
    nodes = ast.parse(path.read_text()).body
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef))


def mistakes(text, promises):
    """What is wrong with the promises of a page, a line each."""
    for sentence, tests in promises.items():
        count = text.count(sentence)
        if count != 1:
            yield (
                f"{sentence!r} stands on the page {count} times, and must once: where the "
                "page has changed, change tests/laws/promises.toml, too"
            )
        for test in [tests] if isinstance(tests, str) else tests:
            file, _, name = test.partition("::")
            if not name.startswith("test_") or name not in names_in(file):
                yield f"{sentence!r} names {test}, and there is no such test"


@pytest.mark.parametrize("page", LISTED)
def test_a_page_says_what_is_tested(page):
    assert list(mistakes(text_of(page), LISTED[page])) == []


def test_every_page_written_by_hand_is_listed():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    for folder in ("concepts", "systems"):
        pages += (ROOT / "docs" / folder).glob("*.md")
    assert {str(page.relative_to(ROOT)) for page in pages} - MADE == {*LISTED}


def test_the_check_sees_what_has_changed():
    here = "laws/test_promises::test_the_check_sees_what_has_changed"
    text = "It sends what is there. It adds up. It adds up."
    assert list(mistakes(text, {"It sends what": here})) == []
    for promises in (
        {"It sends all": here},
        {"It adds up.": here},
        {"It sends what": [here, "laws/test_promises::test_that_was_renamed"]},
        {"It sends what": "laws/test_promises::mistakes"},
        {"It sends what": "laws/test_of_no_file::test_it"},
    ):
        assert len(list(mistakes(text, promises))) == 1, promises
