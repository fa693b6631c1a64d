"""The mutants edit what the library has; `python -m tests.laws.mutants` runs them."""

import pytest

from tests import edits
from tests.laws.mutants import MUTANTS, table


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_edits_one_place(name):
    mutant = MUTANTS[name]
    file, source = edits.apply(mutant.edit)
    assert source != file.read_text()
    for path in mutant.tests:
        assert (edits.ROOT / path.split("::")[0]).exists()


def test_about_sixty_are_at_the_seams():
    assert 50 <= sum(mutant.seam for mutant in MUTANTS.values()) <= 75


def test_the_table_of_laws_is_that_of_the_mutants():
    text = table.PAGE.read_text()
    assert table.page(text) == text, "run python -m tests.laws.mutants.table"
