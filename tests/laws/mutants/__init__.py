"""Edits that break the library, one each, and the tests that must notice.

Each file of this folder lists some. `at`, `old` and `new` are those of `tests.edits.Edit`;
`tests` are arguments of pytest; `seam` marks those that break what all else stands on.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests import edits


class Mutant(NamedTuple):
    """One edit.

    Attributes:
        edit: What is changed.
        tests: The arguments of pytest for the tests that must notice.
        seam: Whether it runs by default.
    """

    edit: edits.Edit
    tests: tuple[str, ...]
    seam: bool


def _read() -> dict[str, Mutant]:
    mutants = {}
    for file in sorted(Path(__file__).parent.glob("*.toml")):
        for name, one in tomllib.loads(file.read_text()).items():
            if name in mutants:
                raise ValueError(f"{file.name} has {name!r}, which another file has, too.")
            tests = one["tests"] if isinstance(one["tests"], list) else [one["tests"]]
            edit = edits.Edit(one["at"], one["old"], one["new"])
            mutants[name] = Mutant(edit, tuple(tests), one.get("seam", False))
    return mutants


MUTANTS = _read()
_QUICK, _SLOW = (("-m", mark, "-n", "2") for mark in ("not slow", "slow"))
_NONE = 5  # pytest's exit status where it runs no test
FAILS_ANYWAY = "Without an edit {} fails; mend that first."


def run(mutant: Mutant, *how: str) -> tuple[bool, str]:
    """Whether the tests notice a mutant, and the first that did.

    Args:
        mutant: The edit and its tests.
        *how: Options of pytest. If none are given, tests that are not slow run first, on
            two processes, and the slow ones where none of these notices. A slow one that
            notices must then pass without the edit: `control` runs none of them.
    """
    file, source = edits.apply(mutant.edit)
    with _copy_of_the_tree() as tree:
        edited = tree / file.relative_to(edits.ROOT)
        edited.write_text(source)
        if how:
            return first_failure(tree, mutant.tests, *how)
        caught, test = first_failure(tree, mutant.tests, *_QUICK)
        if caught:
            return True, test
        caught, test = first_failure(tree, mutant.tests, *_SLOW)
        if caught:
            edited.write_text(file.read_text())
            fails, _ = first_failure(tree, [test.partition("[")[0]], *_SLOW)
            if fails:
                raise SystemExit(FAILS_ANYWAY.format(test))
        return caught, test


def control(mutants: Iterable[Mutant]) -> tuple[bool, str]:
    """Whether tests that are not slow fail without an edit, and the first that does."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    with _copy_of_the_tree() as tree:
        return first_failure(tree, tests, *_QUICK)


@contextlib.contextmanager
def _copy_of_the_tree() -> Iterator[Path]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(
        command, cwd=edits.ROOT, capture_output=True, text=True, check=True
    )
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        for name in filter(None, listed.stdout.split("\0")):
            if (edits.ROOT / name).is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(edits.ROOT / name, tree / name)
        yield tree


def first_failure(tree: Path, tests: Iterable[str], *how: str) -> tuple[bool, str]:
    """Whether a test of a copy of the tree fails, and the first that does."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += [*how, *tests]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    done = subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    # A worker that stops at its first failure counts as an interrupt. Where nothing failed
    # and not all passed, nothing was collected, or pytest broke. All tests of a mutant may
    # be slow, or none.
    fine = (0, _NONE) if how in (_QUICK, _SLOW) else (0,)
    if done.returncode not in fine and not failed:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    return failed is not None, failed[1] if failed else ""
