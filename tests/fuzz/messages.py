"""Messages of random words, read by everything that reads messages.

Whoever reads a message trusts nothing in it but its own sizes: whatever the words are, it
ends, and neither reads nor writes outside of its buffers. What it makes of them may be
wrong. So of each reader this is held:

    it ends     no loop is as long as a message says
    counts      it folds no more entries than the header says, and there is room for
    behind      what lies behind a message changes nothing ("reference")
    canaries    what lies behind an array stays as it is (`triton_words`)

Plain XLA clamps what is read and drops what is written outside by its own definition; the
kernels of Triton have to see to it themselves.
"""

import contextlib
import dataclasses
import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from sparsejax.schemes import row_lists
from sparsejax.units.row_grads import RowGrads
from sparsejax.wire import at_once, channels, gathers, tiles
from sparsejax.wire.messages import Fold
from tests import helpers
from tests.fuzz.words import FILLS, Words, changed, entries_of, size_of, words_of
from tests.kernels import messages as by_hand
from tests.kernels.messages import AT, CASES


READERS = (*("reference", "tiles", "whole", "lists"), *("reference", "tiles", "whole"))
_HOWS = [pallas_kernels.Unpacking(replaces) for replaces in (False, True)]


def case(rng: Any) -> str:
    """The name of one of the messages that are written by hand."""
    return rng.choice([*CASES])


def check(program: Any, words: Words) -> set[str]:
    """Raises unless a reader takes these words, and no more of them than there are.

    Returns:
        Which reader had something to read, and in which index code.
    """
    case = by_hand.CASES[program.case]
    if not _READERS[program.scheme](case, words):
        return set()
    code = case.codes[case.rung]
    return {program.scheme if program.scheme == "lists" else f"{program.scheme}: {code}"}


def _compiled_as(case):
    """The case for which its program is compiled: what else there is in it is data."""
    return dataclasses.replace(case, rung=0, first=0)


@functools.cache
def _by_reference(case):
    how = {"spec": case.spec, "backend": "reference"}

    def read(into, message, numbers):
        received = pallas_kernels.Received(message)
        summed, put = (
            pallas_kernels.unpack_message(into, received, numbers, how=does, **how)
            for does in _HOWS
        )
        return summed, put, pallas_kernels.index_message(message, numbers, **how)

    return jax.jit(read)


def check_reference(case: Any, words: Words) -> bool:
    """The operations of `pallas_kernels`, in plain XLA."""
    run = _by_reference(_compiled_as(case))
    message = words_of(words, case.received)
    into = np.ones((size_of(case), *case.shape), case.dtype)
    results = []
    for fill in FILLS:
        message[:, case.form.ladder.rungs[case.rung].words :] = fill
        summed, put, _ = run(into, message, case.numbers)
        results.append([np.asarray(x) for x in (summed, put)])
    summed, put = results[0]
    entries = entries_of(case, message)
    assert changed(into, summed) <= entries
    assert changed(into, put) <= entries
    assert summed.shape == put.shape == into.shape
    # Those of one unit are added in any order, but here in the same.
    for one, other in zip(*results, strict=True):
        assert one.tobytes() == other.tobytes(), "it looks behind the message"
    return entries > 0


def _counting(case):
    """What adds the entries that are there to a sum, and counts them."""

    def add(carry, sender, slots, values):
        del sender
        total, count = carry
        there = slots < case.width
        total = total.at[slots].add(values.astype(total.dtype), mode="drop")
        return total, count + jnp.sum(there, dtype=jnp.int32)

    return add


@functools.cache
def _folding(case, how):
    """Whatever is folded, and how many entries: by tiles, or whole as on GPUs."""

    def read(into, message, numbers):
        start = into, jnp.int32(0)
        fold = Fold(start, _counting(case), in_order=how == "in order")
        run = jax.lax.slice_in_dim(numbers, AT, len(case.numbers))
        if how == "tiles":
            counts = jax.lax.bitcast_convert_type(message[:, 0], jnp.int32)
            run = tiles.TileRun(run[0], run[1], run[2:])
            return tiles.unpack(case.form, message, counts, run, fold, start)
        return at_once.unpack(case.form, message, run, fold, start)

    traced = helpers.for_gpus() if how != "tiles" else contextlib.nullcontext()
    arrays = _into(case), case.received, case.numbers
    with traced:
        return jax.jit(read).lower(*arrays).compile()


def _into(case):
    return np.zeros((case.width, *case.shape), np.float32)


def check_fold(case: Any, words: Words, how: str) -> bool:
    """`sparsejax.wire`: what the fold of an exchange is given."""
    message = words_of(words, case.received)
    run = _folding(_compiled_as(case), how)
    total, count = run(_into(case), message, case.numbers)
    entries = entries_of(case, message)
    assert int(count) <= entries
    assert changed(_into(case), np.asarray(total)) <= int(count)
    return entries > 0


_HEIGHT, _ROOM, _SENDERS = 300, 24, 3


@functools.cache
def _by_lists():
    like = RowGrads(jnp.zeros(_ROOM, jnp.int32), jnp.zeros((_ROOM, 2)), (_HEIGHT, 2))

    def on_rank(ids, rows, garbage):
        # A list that is shorter than there is room for comes in a shorter message.
        send = lambda x: garbage[:, : x.shape[1]]
        channel = channels.Channel(send, _SENDERS, channels.Route(_SENDERS - 1))
        tables = [RowGrads(ids, rows, like.shape)]
        with mock.patch.object(gathers, "gather_channel", return_value=channel):
            (total,), _ = row_lists.gathered(tables, helpers.WIRE)
        return total.ids, total.rows

    mapped = jax.vmap(on_rank, (0, 0, None), axis_name=helpers.AXIS)
    return jax.jit(mapped)


def check_lists(case: Any, words: Words) -> bool:
    """Lists of rows that all ranks gather: slots that are anything."""
    del case
    some = 1 + words.seed % _ROOM
    ids = np.full((_SENDERS, _ROOM), _HEIGHT, np.int32)
    ids[:, :some] = 1 + np.arange(_SENDERS * some).reshape(_SENDERS, some)
    rows = np.ones((_SENDERS, _ROOM, 2), np.float32)
    right = np.zeros((_SENDERS, 3 * _ROOM), np.uint32)
    right[:, ::3] = ids
    message = words_of(words, right)
    found, sums = map(np.asarray, _by_lists()(ids, rows, message))
    assert found.shape[1] == min(_SENDERS * _ROOM, _HEIGHT)
    assert sums.shape == (*found.shape, 2)
    slots = message[:, ::3].view(np.int32)
    sizes = row_lists.message_sizes(_ROOM, 12)
    columns = sizes.rooms[sizes.number(some)]
    slots = slots[:, :columns]
    if ((slots >= 0) & (slots <= _HEIGHT)).all():
        # No row but those that came, and of what is behind a message none.
        there = np.isin(found, slots) | (found == _HEIGHT)
        assert there.all(), f"rows {found[~there]} are in no list"
    return True


_READERS = {
    "reference": check_reference,
    "tiles": functools.partial(check_fold, how="tiles"),
    "whole": functools.partial(check_fold, how="whole"),
    "lists": check_lists,
}


def forget() -> None:
    """Gives back the memory of all programs."""
    for made in (_by_reference, _folding, _by_lists):
        made.cache_clear()
