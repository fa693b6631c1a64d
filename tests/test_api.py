"""Every public name is in the reference, and its example runs.

`tests/test_docstrings.py` has the rules of docstrings.
"""

import inspect
import re

import pytest

from docs import public
from tests import helpers
from tests.helpers import snippets


PUBLIC = public.names()
EXAMPLES = {name: inspect.getdoc(value) or "" for name, value in public.listed().items()}
# They compile much. What they show is tested by default elsewhere.
LONG = ("pallas_kernels.", "sparsejax.advise.", "sparsejax.embrace", "sparsejax.rows.")
LONG += ("sparsejax.SparseTensor", "sparsejax.all_reduce", "sparsejax.bind")
LONG += ("sparsejax.make_plan", "sparsejax.summary", "sparsejax.value_and_grad")
LONG += ("sparsejax.ColumnTable", "sparsejax.column_lookup", "sparsejax.data_parallel")
LONG += ("sparsejax.lazy", "sparsejax.rounds.Overlap", "sparsejax.sparsifiers.Draw")
LONG += ("sparsejax.errors.AlreadySummedError", "sparsejax.errors.BadNumberError")
QUICK = [name for name in sorted(EXAMPLES) if not name.startswith(LONG)]
# Lines of a step, which are traced; what comes of them the tests of their folders say.
TRACED = {
    "sparsejax.embrace.flush",
    "sparsejax.embrace.horizontal",
    "sparsejax.embrace.rows_read",
    "sparsejax.rows.within_capacity",
}


def test_the_reference_has_every_public_name_once():
    assert len(PUBLIC) > 100
    missing = {*PUBLIC} - {*public.LISTED}
    assert not missing, "add them to a page of docs/api"
    assert len(public.LISTED) == len({*public.LISTED})
    private = [name for name in public.LISTED if re.search(r"\._", name)]
    assert not private, "no name of the reference begins with an underscore"


@pytest.mark.parametrize("name", helpers.mostly_slow(sorted(EXAMPLES), *QUICK))
def test_the_example_of_a_name_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # one saves a plan
    names = snippets.given() | snippets.OF_NAMES.get(name, dict)()
    if name in TRACED:
        snippets.traced(EXAMPLES[name], name, names)
    else:
        snippets.run_doctest(name, EXAMPLES[name], names)


def test_what_is_said_of_names_is_of_names_that_there_are():
    assert {*snippets.OF_NAMES, *TRACED} <= {*EXAMPLES}
