"""Which law guards which module, read off the mutants.

    python -m tests.laws.mutants.table

Writes the table of CONTRIBUTING.md. A row is a folder: its modules that some mutant edits,
with the tests that notice. `test_mutants.py` holds the page to it.
"""

import collections
import re
from collections.abc import Iterator

from tests import edits
from tests.laws.mutants import MUTANTS


PAGE = edits.ROOT / "CONTRIBUTING.md"
_BEGIN = "<!-- laws: made by `python -m tests.laws.mutants.table` -->"
_END = "<!-- /laws -->"
_WHOLE = re.compile(f"{re.escape(_BEGIN)}.*{re.escape(_END)}", re.DOTALL)


def rows() -> Iterator[tuple[str, str]]:
    """A folder of the library, and its modules with the tests that guard each."""
    laws: dict[str, dict[str, set[str]]] = collections.defaultdict(dict)
    for mutant in MUTANTS.values():
        file = edits.find(mutant.edit).file.relative_to(edits.ROOT)
        tests = (test.split("::")[0].removeprefix("tests/") for test in mutant.tests)
        laws[str(file.parent)].setdefault(file.stem, set()).update(tests)
    for folder in sorted(laws):
        by_tests = collections.defaultdict(list)
        for module in sorted(laws[folder]):
            by_tests[tuple(sorted(laws[folder][module]))].append(module)
        each = (f"{', '.join(own)}: {_written(tests)}" for tests, own in by_tests.items())
        yield folder, "; ".join(each)


def _written(tests):
    return ", ".join(f"`{test.removesuffix('.py')}`" for test in tests)


def page(text: str) -> str:
    """A page with the table in its place."""
    lines = [f"| `{folder}` | {laws} |" for folder, laws in rows()]
    table = ["| folder | modules, and the tests that guard them |", "| --- | --- |", *lines]
    made = "\n".join([_BEGIN, *table, _END])
    found, count = _WHOLE.subn(lambda _: made, text)
    assert count == 1, f"{PAGE.name} must have {_BEGIN} and {_END}, once"
    return found


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
