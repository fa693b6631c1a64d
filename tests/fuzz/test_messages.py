"""The fuzzer of messages held to what it is for: a broken bound is found."""

import types
from pathlib import Path
from unittest import mock

import pytest

from pallas_kernels.reference.messages import Run
from sparsejax.wire.index_codes import CODES
from tests.fuzz import campaign, messages, pool, ways
from tests.kernels import messages as by_hand


ROOT = Path(__file__).parents[2]
# By name: the reader, what is imported there, its file, what stands there, and the mutant.
BROKEN = {
    "more entries than a message has room for": (
        "reference",
        "Run.here",
        "pallas_kernels/reference/messages.py",
        "return jnp.clip(counts - self.first, 0, self.length)",
        "return jnp.clip(counts - self.first, 0, self.length + 4)",
    ),
    "as many entries as a header says": (
        "whole",
        "Run.here",
        "pallas_kernels/reference/messages.py",
        "return jnp.clip(counts - self.first, 0, self.length)",
        "return jnp.maximum(counts - self.first, 0)",
    ),
    "a last tile of entries that are not there": (
        "tiles",
        "tiles",
        "sparsejax/wire/tiles.py",
        "slots = jnp.where(rank < here, slots, ladder.width)",
        "pass",
    ),
    "an entry behind the last": (
        "ragged",
        "ragged",
        "sparsejax/wire/ragged.py",
        "slots = jnp.where(rank < here, slots, form.width)",
        "slots = jnp.where(rank <= here, slots, form.width)",
    ),
    "a string that is read past its end": (
        "ragged",
        "ragged",
        "sparsejax/wire/ragged.py",
        "used = lax.iota(jnp.int32, form.longest) < places.string",
        "used = lax.iota(jnp.int32, form.longest) < form.longest + 0 * places.string",
    ),
    "rows behind a shorter list": (
        "lists",
        "row_lists",
        "sparsejax/schemes/row_lists.py",
        "        slots = jnp.where(inside, slots, nowhere)\n",
        "",
    ),
    "units behind the end": (
        "pallas",
        "in_pallas",
        "pallas_kernels/pallas/messages.py",
        "there = there & (unit >= 0) & (unit < form.size)",
        "there = there & (unit >= 0)",
    ),
    "units before the beginning": (
        "pallas",
        "in_pallas",
        "pallas_kernels/pallas/messages.py",
        "there = there & (unit >= 0) & (unit < form.size)",
        "there = there & (unit < form.size)",
    ),
}


def edited(file, old, new):
    """A module of a file with one edit."""
    source = (ROOT / file).read_text()
    assert source.count(old) == 1, f"{old!r} is not once in {file}"
    made = types.ModuleType("mutant")
    exec(compile(source.replace(old, new), file, "exec"), made.__dict__)
    return made


def found(reader):
    messages.forget()
    cases = [f"mixed, {code}" for code in CODES]
    tried = [pool.Program("messages", reader, case=case) for case in cases]
    failure = campaign.find_failure(tried, 150, 0, campaign.Tally())
    messages.forget()
    return failure


@pytest.mark.parametrize("name", BROKEN)
def test_a_bound_that_is_broken_is_found(name):
    reader, where, *edit = BROKEN[name]
    made = edited(*edit)
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
