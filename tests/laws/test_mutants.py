"""The mutants still edit what is there; `python -m tests.laws.mutants` runs them."""

import pytest

from tests.laws.mutants import MUTANTS, ROOT


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_edits_one_place(name):
    mutant = MUTANTS[name]
    source = (ROOT / mutant.file).read_text()
    assert source.count(mutant.old) == 1
    compile(source.replace(mutant.old, mutant.new), mutant.file, "exec")
    for path in mutant.tests.split():
        assert (ROOT / path.split("::")[0]).exists()
