"""Every public name is documented, has an example that runs, and is in the reference."""

import importlib
import inspect
import pathlib
import re
import types

import pytest

import pallas_kernels
import sparsejax
from tests import helpers
from tests.helpers import snippets


REFERENCE = pathlib.Path(__file__).parent.parent / "docs" / "api"
PAGES = [path.read_text() for path in sorted(REFERENCE.glob("*.md"))]
LISTED = re.findall(
    r"^\.\. auto(?:function|class|exception):: (\S+)$", "\n".join(PAGES), re.M
)
# Examples of names whose docstrings have none: behind a heading of the name.
BESIDE = dict(
    re.findall(r"^### `([\w.]+)`\n\n```pycon\n(.*?)^```$", "\n".join(PAGES), re.M | re.S)
)
OURS = ("sparsejax", "pallas_kernels")


def public():
    """Every public function and class by its shortest name."""
    folders = [
        value
        for name in dir(sparsejax)
        if isinstance(value := getattr(sparsejax, name), types.ModuleType)
        and name != "__main__"  # there once a test has imported the command line
    ]
    found = {}
    for module in (sparsejax, *folders, pallas_kernels):
        for name in dir(module):
            value = getattr(module, name)
            of_errors = module is not sparsejax.errors or inspect.isclass(value)
            mine = str(getattr(value, "__module__", "")).startswith(OURS)
            if callable(value) and not name.startswith("_") and of_errors and mine:
                found.setdefault(id(value), (f"{module.__name__}.{name}", value))
    return dict(found.values())


PUBLIC = public()
EXAMPLES = {
    name: BESIDE.get(name) or (inspect.getdoc(value) or "")
    for name, value in PUBLIC.items()
}
# They compile much. What they show is tested by default elsewhere.
LONG = {
    "pallas_kernels.Partitioned",
    "pallas_kernels.pack_message",
    "pallas_kernels.partition",
    "pallas_kernels.partition_by_bits",
    "pallas_kernels.partition_dense",
    "pallas_kernels.unpack_message",
    "sparsejax.ColumnTable",
    "sparsejax.advise.measure_compression",
    "sparsejax.advise.measure_teams",
    "sparsejax.advise.worthwhile",
    "sparsejax.column_lookup",
    "sparsejax.data_parallel",
    "sparsejax.embrace.flush",
    "sparsejax.embrace.rows_held",
    "sparsejax.embrace.rows_read",
    "sparsejax.embrace_sync",
    "sparsejax.errors.AlreadySummedError",
    "sparsejax.lazy",
    "sparsejax.sparsifiers.Draw",
}
# Lines of a step, which are traced; what comes of them the tests of their folders say.
TRACED = {
    "sparsejax.embrace.flush",
    "sparsejax.embrace.horizontal",
    "sparsejax.embrace.rows_read",
    "sparsejax.rows.within_capacity",
}


def test_the_reference_has_every_public_name_once():
    assert len(PUBLIC) > 100
    missing = {*PUBLIC} - {*LISTED}
    assert not missing, "add them to a page of docs/api"
    assert len(LISTED) == len({*LISTED})
    for name in {*LISTED} - {*PUBLIC}:  # of modules that nobody needs to import
        module, _, attribute = name.rpartition(".")
        assert getattr(importlib.import_module(module), attribute).__doc__


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_name_is_documented_with_an_example(name):
    doc = inspect.getdoc(PUBLIC[name]) or ""
    first = doc.split("\n\n")[0]
    assert len(first.split()) >= 2, f"{name} needs a docstring"
    assert first.rstrip().endswith((".", ":")), f"{name}: {first!r}"
    # What `dataclass` writes is no documentation.
    assert not doc.startswith(f"{name.rpartition('.')[2]}("), f"{name} needs a docstring"
    assert ">>> " in EXAMPLES[name], f"{name} needs an Example: in its docstring"


@pytest.mark.parametrize(
    "name",
    [*sorted({*PUBLIC} - LONG), *helpers.slow(*sorted(LONG))],
)
def test_the_example_of_a_name_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # one saves a plan
    names = snippets.given() | snippets.OF_NAMES.get(name, dict)()
    if name in TRACED:
        snippets.traced(EXAMPLES[name], name, names)
    else:
        snippets.run_doctest(name, EXAMPLES[name], names)


def test_what_is_said_of_names_is_of_names_that_there_are():
    assert {*snippets.OF_NAMES, *LONG, *TRACED, *BESIDE} <= {*PUBLIC}
