"""The fuzzer of messages held to what it is for: a broken bound is found."""

import types
from unittest import mock

import pytest

from pallas_kernels.reference.layout import Run
from sparsejax.wire.index_codes import CODES
from tests import edits
from tests.edits import Edit
from tests.fuzz import campaign, messages, pool, ways
from tests.kernels import messages as by_hand


# By name: the reader, what is imported there, and the mutant.
BROKEN = {
    "more entries than a message has room for": (
        "reference",
        "Run.here",
        Edit("Run.here", "self.length", "self.length + 4"),
    ),
    "as many entries as a header says": (
        "whole",
        "Run.here",
        Edit(
            "Run.here",
            "jnp.clip(counts - self.first, 0, self.length)",
            "jnp.maximum(counts - self.first, 0)",
        ),
    ),
    "a last tile of entries that are not there": (
        "tiles",
        "tiles",
        Edit("tiles.unpack", "slots = jnp.where(rank < here, slots, ladder.width)", "pass"),
    ),
    "rows behind a shorter list": (
        "lists",
        "row_lists",
        Edit("Lists.send", "slots = jnp.where(inside, slots, nowhere)", "pass"),
    ),
}


def edited(edit):
    """A module of the file that has one edit."""
    file, source = edits.apply(edit)
    made = types.ModuleType("mutant")
    exec(compile(source, str(file), "exec"), made.__dict__)
    return made


def found(reader):
    messages.forget()
    cases = [f"mixed, {code}" for code in CODES]
    tried = [pool.Program("messages", reader, case=case) for case in cases]
    failure = campaign.find_failure(tried, 150, 0, campaign.Tally())
    messages.forget()
    return failure


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_a_bound_that_is_broken_is_found(name):
    reader, where, edit = BROKEN[name]
    made = edited(edit)
    if where == "Run.here":
        broken = mock.patch.object(Run, "here", made.Run.here)
    else:
        broken = mock.patch.object(messages, where, made)
    with broken:
        failure = found(reader)
    assert failure is not None
    assert "AssertionError" in failure.error
    assert (failure.data.seed, failure.program.scheme) == (0, reader)


def test_every_reader_reads_every_code_and_one_program_reads_all_of_a_form():
    codes = {by_hand.CASES[f"mixed, {code}"].codes for code in CODES}
    assert len(codes) == 1
    chosen = {(program.scheme, program.case) for program in ways.chosen("messages")}
    for reader in ways.BY_CODE:
        assert {(reader, f"mixed, {code}") for code in CODES} <= chosen
    assert set(messages.READERS) == {reader for reader, _ in chosen}
    mixed = [by_hand.CASES[f"mixed, {code}"] for code in CODES]
    assert len({messages._compiled_as(case) for case in mixed}) == 1
