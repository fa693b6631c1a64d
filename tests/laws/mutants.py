"""Edits that break the library, one each, and the tests that must notice.

    python -m tests.laws.mutants [NAME ...]

Copies the tree, makes one edit, runs the tests named beside it that are not slow, and goes
on with the next: a law that nothing can break is no law. Each mutant ends "caught", with
the first test that failed, or "MISSED". All of them take about an hour on two cores;
`test_mutants.py` checks that what they edit is still there.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple


ROOT = Path(__file__).resolve().parents[2]


class Mutant(NamedTuple):
    """One edit.

    Attributes:
        file: The file, from the root.
        old: What stands there, once.
        new: What the mutant has instead.
        tests: The arguments of pytest for the tests that must notice.
    """

    file: str
    old: str
    new: str
    tests: str


CONSERVATION = "tests/laws/test_conservation.py"
MANY_RANKS = "tests/laws/test_many_ranks.py"
EXACT_SUM = "tests/laws/test_exact_sum.py"
VERTICAL = "tests/embrace/test_vertical.py"
DOCTOR = "tests/advise/doctor/test_findings.py"
REPLICAS = "tests/transforms/state/test_replicas.py"
SETUP = "tests/transforms/state/test_setup.py"
CHECK_EVERY = "tests/training/test_check_every.py"
BAD_NUMBERS = "tests/transforms/test_bad_numbers.py"
SHARDING = "tests/laws/test_sharding.py"
PARTLY_MANUAL = "tests/transforms/test_partly_manual.py"
DENSE_SUM = (
    f"{PARTLY_MANUAL}::test_gradients_are_those_of_a_dense_sum_and_lie_where_they_did"
)

ORDERED = "tests/laws/test_ordered_sums.py"
MUTANTS = {
    # In which order sums are added up.
    "owners add senders in any order": Mutant(
        "sparsejax/schemes/owners/push_pull.py",
        "in_order=ordered.is_ordered(self.wire, x.axes),",
        "in_order=False,",
        ORDERED,
    ),
    "owners add ragged messages in any order": Mutant(
        "sparsejax/schemes/owners/ragged.py",
        "in_order = ordered.is_ordered(self.wire, x.axes)",
        "in_order = False",
        ORDERED,
    ),
    "owners add listed rows in any order": Mutant(
        "sparsejax/schemes/owners/rows.py",
        "if ordered.is_ordered(self.wire, varying_axes(values)):",
        "if False:",
        ORDERED,
    ),
    "rows of equal ids are added in any order": Mutant(
        "sparsejax/units/row_grads.py",
        "return add_repeated(sums, self.places, wider).astype(rows.dtype)",
        'return sums.at[self.places].add(wider, mode="drop").astype(rows.dtype)',
        ORDERED,
    ),
    "messages are unpacked in any order": Mutant(
        "pallas_kernels/reference/messages.py",
        "if alone or (ordered and not replaces):",
        "if alone:",
        f"{ORDERED} tests/kernels/test_ordered.py",
    ),
    "copies of a sum do not count": Mutant(
        "sparsejax/wire/ordered.py",
        "    if copies(wire, over):\n",
        "    if False:\n",
        ORDERED,
    ),
    "copies inside of two levels are added in any order": Mutant(
        "sparsejax/wire/ordered.py",
        "        return True\n    if wire",
        "        return wire.deterministic is not False\n    if wire",
        ORDERED,
    ),
    "copies in any order are not refused": Mutant(
        "sparsejax/wire/ordered.py",
        "    if wire.deterministic is not False:\n",
        "    if True:\n",
        ORDERED,
    ),
    "axes that are not manual have no copies": Mutant(
        "sparsejax/wire/ordered.py",
        "if found := (*copies(wire, over), *further_axes()):",
        "if found := copies(wire, over):",
        ORDERED,
    ),
    "what is left out has one index": Mutant(
        "pallas_kernels/reference/ordered.py",
        "return jnp.where(places < size, places, size + behind)",
        "return jnp.where(places < size, places, size)",
        "tests/kernels/test_ordered.py",
    ),
    "a run takes in its neighbours": Mutant(
        "pallas_kernels/reference/ordered.py",
        "is_of_run = is_meant & (at + step < k) & (places[other] == places)",
        "is_of_run = is_meant & (at + step < k)",
        "tests/kernels/test_ordered.py",
    ),
    "one leaf of distinct entries is enough": Mutant(
        "sparsejax/units/entries.py",
        "distinct = all(tensor.distinct for tensor in tensors)",
        "distinct = any(tensor.distinct for tensor in tensors)",
        ORDERED,
    ),
    # Where arrays lie.
    "a table is cut where it is sharded": Mutant(
        "sparsejax/embrace/column_table.py",
        "return axes.unsharded(self.value)[:, : self.dim]",
        "return self.value[:, : self.dim]",
        "tests/embrace/test_column_table.py",
    ),
    "a state of sharded parameters is whole": Mutant(
        "sparsejax/transforms/state/placed.py",
        "arrays = known if param_specs is not None else Known.of_arrays(params, mesh)",
        "arrays = known",
        SHARDING,
    ),
    "parameters may be sharded over the ranks": Mutant(
        "sparsejax/transforms/state/placed.py",
        '        arrays.check_arrays(axis_name, "sparsejax.init")\n',
        "",
        SHARDING,
    ),
    "the trainer makes sharded parameters whole": Mutant(
        "sparsejax/training/trainer.py",
        '                arrays.check_replicated("trainer.init")\n',
        "",
        SHARDING,
    ),
    "parameters are gathered to make a state": Mutant(
        "sparsejax/transforms/state/placed.py",
        "mapped = jax.shard_map(init, **options, axis_names=manual)",
        "mapped = jax.shard_map(init, **options)",
        SHARDING,
    ),
    "operands of a step have to be in place": Mutant(
        "sparsejax/transforms/state/placed.py",
        "return mapped(*jax.tree.map(put, operands, specs))",
        "return mapped(*operands)",
        "tests/training/test_trainer.py",
    ),
    "a shape that varies is asked as an array is": Mutant(
        "pallas_kernels/types.py",
        "    if isinstance(x, jax.ShapeDtypeStruct):\n",
        "    if x is None:\n",
        f"{DENSE_SUM}[skipping-True-auto]",
    ),
    "what XLA shards is not gathered": Mutant(
        "sparsejax/axes.py",
        "    if not further:\n        return function\n",
        "    if further or not further:\n        return function\n",
        f"{DENSE_SUM}[zen-True-explicit]",
    ),
    "sums lose the sharding of gradients": Mutant(
        "sparsejax/axes.py",
        "return x if is_whole or x.shape != other.shape else jax.reshard(x, sharding)",
        "return x",
        f"{DENSE_SUM}[zen-True-explicit]",
    ),
    "a state of shards is taken for one of whole leaves": Mutant(
        "sparsejax/transforms/state/per_rank.py",
        "or (is_derived and not inside):",
        "or is_derived:",
        PARTLY_MANUAL,
    ),
    "ranks catch up rows where XLA shards tables": Mutant(
        "sparsejax/rows/updates/view.py",
        "        if self._view.moving:\n            _check_axes()\n",
        "",
        PARTLY_MANUAL,
    ),
    "a part of a tree of parameters has the type of a mesh": Mutant(
        "sparsejax/transforms/state/observing.py",
        "    return jax.ShapeDtypeStruct(x.shape, x.dtype) if placed else x\n",
        "    return x\n",
        "tests/transforms/state/test_specs.py",
    ),
    "checksums are compiled for each way to write a spec": Mutant(
        "sparsejax/transforms/state/alike/replicas.py",
        "tuple(_shortest(leaf.spec) for leaf in leaves)",
        "tuple(leaf.spec for leaf in leaves)",
        REPLICAS,
    ),
    "what is examined has to be in place": Mutant(
        "sparsejax/advise/doctor/ranks.py",
        "mapped = placed.on_ranks(on_rank, ",
        "mapped = jax.shard_map(on_rank, ",
        DOCTOR,
    ),
    # Many ranks.
    "of many rows of a message the first is sent to all": Mutant(
        "sparsejax/wire/collectives.py",
        "        return x[:count, :words]\n",
        "        return jnp.repeat(x[:1, :words], count, axis=0)\n",
        f"{MANY_RANKS}::test_64_ranks_have_the_exact_sum",
    ),
    "programs have an operation for each row of a message": Mutant(
        "sparsejax/wire/collectives.py",
        "    if count > _MOST_ROWS:\n",
        "    if count < 0:\n",
        "tests/bench/test_programs.py",
    ),
    "programs have an operation for each block of a bag": Mutant(
        "sparsejax/schemes/top_k/spar_reduce_scatter.py",
        "rows = x.reshape(q, blocks.width).at[outgoing].get(**_APART)",
        "rows = jnp.stack([x.reshape(q, -1)[i] for i in outgoing])",
        "tests/bench/test_programs.py",
    ),
    "parts of a doubling are counted past int32": Mutant(
        "sparsejax/schemes/baselines/pulls.py",
        "of = lambda held: held * jnp.minimum(fullest, -(-size // held))",
        "of = lambda held: held * fullest",
        "tests/fuzz/test_sizes.py::test_bytes_of_partners_that_have_more_than_int32_counts",
    ),
    "more rows are listed than int32 numbers": Mutant(
        "sparsejax/schemes/row_lists.py",
        "    if n * listed > MOST_NUMBERED:\n",
        "    if listed > MOST_NUMBERED:\n",
        "tests/fuzz/test_sizes.py::test_more_listed_rows_of_all_ranks_than_int32_numbers_are_refused",
    ),
    # What is summed.
    "what was not pushed comes back": Mutant(
        "sparsejax/schemes/owners/pulls.py",
        "side = jnp.where(instead.wanted, 2, jnp.where(pays, 0, 1))",
        "side = jnp.where(pays, 0, 1)",
        "tests/schemes/owners/test_on_gpus.py",
    ),
    "a push that pays sends nothing": Mutant(
        "sparsejax/schemes/owners/push_pull.py",
        "totals, pushed = axes.cond(pays, push, nothing, x)",
        "totals, pushed = axes.cond(pays, nothing, nothing, x)",
        "tests/schemes/owners/test_on_gpus.py",
    ),
    "a slot belongs to another unit": Mutant(
        "pallas_kernels/striping.py",
        "return column * width(size, parts) + slots",
        "return column * width(size, parts) + (slots ^ 1)",
        "tests/units",
    ),
    "an array that is cut overwrites the next": Mutant(
        "sparsejax/units/selections.py",
        "new = jnp.where(lax.iota(jnp.int32, most) < at_number(lengths, i), new, old)",
        "pass",
        "tests/sparsifiers/test_together.py",
    ),
    "pairs keep the order of keys": Mutant(
        "pallas_kernels/reference/indices.py",
        "return found, where.at[order].set(place, unique_indices=True)",
        "return found, place",
        "tests/kernels/test_kernels.py::test_merge_rows",
    ),
    "a row counts by its sum": Mutant(
        "sparsejax/units/bits.py",
        "return jnp.any((joined << 1) != 0, axis=1)",
        "return jnp.sum(x.reshape(x.shape[0], -1), axis=1) != 0",
        f"tests/units {EXACT_SUM}",
    ),
    "running sums restart in each block": Mutant(
        "pallas_kernels/rank_select.py",
        "whole = inner + above[..., None]",
        "whole = inner",
        "tests/kernels/test_rank_select.py tests/units",
    ),
    "a GPU that is too old for kernels is said to run them": Mutant(
        "pallas_kernels/backends.py",
        "if has is not None and float(has) < LEAST_CAPABILITY:",
        "if has is not None and float(has) < 0:",
        "tests/kernels/test_backends.py",
    ),
    "what is for other platforms is traced beside": Mutant(
        "pallas_kernels/platforms.py",
        "if platform is None:",
        "if True:",
        "tests/kernels/test_platforms.py",
    ),
    "CPUs take what is for others": Mutant(
        "pallas_kernels/platforms.py",
        'platform == "cpu"',
        'platform == "gpu"',
        "tests/kernels/test_platforms.py",
    ),
    "narrow indices are compared as they are": Mutant(
        "sparsejax/units/dtypes.py",
        "return indices.astype(jnp.int32) if indices.dtype.itemsize < 4 else indices",
        "return indices",
        "tests/fuzz/test_indices.py",
    ),
    "negative indices count from the end": Mutant(
        "sparsejax/units/dtypes.py",
        "inside = (indices >= 0) & (indices < size)",
        "inside = indices < size",
        "tests/fuzz/test_indices.py",
    ),
    "more units than int32 numbers are taken": Mutant(
        "sparsejax/units/dtypes.py",
        "if units > MOST_NUMBERED:",
        "if units < 0:",
        "tests/fuzz/test_sizes.py",
    ),
    "bits of many lists are laid end to end": Mutant(
        "sparsejax/units/row_grads.py",
        "or words >= 2**31:",
        "or words < 0:",
        "tests/fuzz/test_sizes.py",
    ),
    "ranks list other rows of a table without numbers": Mutant(
        "sparsejax/units/row_grads.py",
        "ids = jnp.full(self.capacity, self.shape[0], jnp.int32)",
        "ids = self.ids",
        "tests/units/test_row_grads.py",
    ),
    "a tensor without room for an entry is searched": Mutant(
        "sparsejax/units/entries.py",
        "if not units.size:",
        "if units.size < 0:",
        "tests/units/test_entries.py",
    ),
    "a tensor without room for an entry is typed as the same on all ranks": Mutant(
        "sparsejax/units/entries.py",
        "over = varying_axes(units) | varying_axes(values)",
        "over = frozenset()",
        "tests/units/test_entries.py",
    ),
    # How it travels.
    "under vmap, an array that ranks share is sent as it is": Mutant(
        "sparsejax/wire/collectives.py",
        "x = jnp.where(self.rank >= 0, x, x)",
        "pass",
        "tests/transforms/test_all_reduce.py",
    ),
    "messages are longer than int32 can number": Mutant(
        "sparsejax/wire/forms.py",
        "if self.room > MOST_FLAT:",
        "if self.room < 0:",
        "tests/fuzz/test_sizes.py",
    ),
    "the last tile of a message is not packed": Mutant(
        "sparsejax/wire/tiles.py",
        "last = lax.div(entries + (tile - 1), np.int32(tile)) - 1",
        "last = lax.div(entries, np.int32(tile)) - 1",
        "tests/wire/test_messages.py",
    ),
    "the string of a message is written into the first part's": Mutant(
        "pallas_kernels/reference/messages.py",
        "word = part * room + word",
        "word = 0 * part * room + word",
        "tests/wire/test_format.py tests/wire/test_messages.py",
    ),
    "long sums count halves once": Mutant(
        "pallas_kernels/rank_select.py",
        "x = sums.reshape(*x.shape[:-1], -1)",
        "x = sums[..., 0].reshape(*x.shape[:-1], -1)",
        "tests/units/test_bits.py",
    ),
    "there is no second round": Mutant(
        "sparsejax/wire/messages.py",
        "state = lax.while_loop(lambda state: state[0] < need, one_round, state)",
        "state = one_round(state)",
        "tests/wire/test_messages.py",
    ),
    "for GPUs, what fills the longest message is not sent": Mutant(
        "sparsejax/wire/forms.py",
        "first = lax.div(jnp.maximum(need, 1) - 1, top)",
        "first = lax.div(need, top)",
        "tests/wire/test_at_once.py",
    ),
    "for GPUs, a piece of a message lacks its last entries": Mutant(
        "sparsejax/wire/forms.py",
        "last = min(first + each, rung.capacity)",
        "last = min(first + each - 4, rung.capacity)",
        "tests/wire/test_at_once.py",
    ),
    "for GPUs, what is packed in branches is not packed by the kernel": Mutant(
        "pallas_kernels/backends.py",
        "if liked is None or liked not in kernels or why_not(liked) is not None:",
        "if liked is not None or liked not in kernels or why_not(liked) is not None:",
        "tests/kernels/test_backends.py",
    ),
    "what a kernel is preferred for is not forgotten": Mutant(
        "pallas_kernels/backends.py",
        "    token = _asked.set(asked)\n"
        "    try:\n        yield\n    finally:\n        _asked.reset(token)\n",
        "    _asked.set(asked)\n    yield\n",
        "tests/kernels/test_backends.py",
    ),
    "for GPUs, each message of several begins with the first entry": Mutant(
        "sparsejax/wire/forms.py",
        "parts = self.numbers[: self.at_last], first[None], self.numbers[4 : self.at_last]",
        "parts = self.numbers[: self.at_last], self.numbers[3 : self.at_last]",
        "tests/wire/test_at_once.py",
    ),
    "for GPUs, the last message is read as the first one": Mutant(
        "sparsejax/wire/messages.py",
        "carry = self.unpack_whole(arrived, lengths.numbers, carry, lengths.at_last)",
        "carry = self.unpack_whole(arrived, lengths.numbers, carry, lengths.at_first)",
        "tests/wire/test_at_once.py",
    ),
    "what replaces is added where there are several senders": Mutant(
        "pallas_kernels/reference/messages.py",
        "    if not replaces:\n",
        "    if not replaces or len(message) > 1:\n",
        "tests/kernels/test_messages.py tests/wire/test_at_once.py",
    ),
    "what one sender sends is set, not added": Mutant(
        "pallas_kernels/reference/messages.py",
        "return ordered_sums.add_senders(into, where, read)",
        "values = values.reshape(-1, *shape).astype(into.dtype)\n        "
        'return into.at[where.reshape(-1)].set(values, mode="drop")',
        "tests/kernels/test_messages.py",
    ),
    "what one sender sends is added atomically": Mutant(
        "pallas_kernels/reference/messages.py",
        "alone = not replaces and len(message) == 1",
        "alone = False",
        "tests/kernels/test_messages.py",
    ),
    "words of a message behind its last entry are not zero": Mutant(
        "pallas_kernels/reference/messages.py",
        "lanes = _lanes(jnp.where(is_there, slots, 0), places, column)",
        "lanes = _lanes(slots, places, column)",
        "tests/kernels/test_messages.py",
    ),
    "for GPUs, rounds before the last are not folded": Mutant(
        "sparsejax/wire/messages.py",
        "_, carry, message = lax.while_loop(more, turn, state)",
        "_, _, message = lax.while_loop(more, turn, state)\n            carry = self.start",
        "tests/wire/test_at_once.py",
    ),
    "for GPUs, a message that follows others is one size too short": Mutant(
        "sparsejax/wire/messages.py",
        "return lax.switch(lengths.final, finals",
        "return lax.switch(lengths.final - 1, finals",
        "tests/wire/test_at_once.py",
    ),
    "for GPUs, a unit counts itself among those below it": Mutant(
        "pallas_kernels/rank_select.py",
        "from_here = lax.population_count(here)",
        "from_here = lax.population_count(here & ~jnp.uint32(1))",
        "tests/wire/test_at_once.py",
    ),
    "for GPUs, the last of the runs of dense sums is left out": Mutant(
        "sparsejax/schemes/owners/pulls.py",
        "runs = -(-width // run)",
        "runs = width // run",
        "tests/wire/test_at_once.py",
    ),
    "for GPUs, the dense side adds up zeros": Mutant(
        "sparsejax/schemes/or_dense.py",
        "jnp.where(pays, jnp.zeros_like(x), x)",
        "jnp.where(pays, x, jnp.zeros_like(x))",
        "tests/wire/test_at_once.py",
    ),
    "a message is one size too long": Mutant(
        "sparsejax/wire/ladder.py",
        "rung = jnp.sum(below, dtype=jnp.int32) >> 1",
        "rung = jnp.minimum((jnp.sum(below, dtype=jnp.int32) >> 1) + 1, len(room) - 1)",
        "tests/wire/test_ladder.py tests/wire/test_messages.py",
    ),
    "the dearest index code is taken": Mutant(
        "sparsejax/wire/index_codes.py",
        "return min(among, key=lambda code: code.words(capacity, width))",
        "return max(among, key=lambda code: code.words(capacity, width))",
        "tests/wire/test_index_codes.py tests/wire/test_ladder.py",
    ),
    "a ragged message ends a word too soon": Mutant(
        "sparsejax/wire/ragged.py",
        "length = values + self.value_words(counts)",
        "length = values + self.value_words(counts) - (counts > 1)",
        "tests/wire/test_ragged.py",
    ),
    "a ragged message takes the longest code": Mutant(
        "sparsejax/wire/ragged.py",
        "is_less = others[0] < words",
        "is_less = others[0] > words",
        "tests/wire/test_ragged.py",
    ),
    "the string of a ragged message is read past its end": Mutant(
        "sparsejax/wire/ragged.py",
        "used = lax.iota(jnp.int32, form.longest) < places.string",
        "used = lax.iota(jnp.int32, form.longest) < form.longest + 0 * places.string",
        "tests/wire/test_ragged.py",
    ),
    "entries behind a ragged message are folded": Mutant(
        "sparsejax/wire/ragged.py",
        "slots = jnp.where(rank < here, slots, form.width)",
        "slots = jnp.where(rank <= here, slots, form.width)",
        "tests/wire/test_ragged.py",
    ),
    "a rank expects of others what it sends to them": Mutant(
        "sparsejax/wire/ragged.py",
        "self.wire.ragged(message, sizes, self.form.lengths(there))",
        "self.wire.ragged(message, sizes, sizes)",
        f"{EXACT_SUM}::test_every_variant_gives_the_exact_sum",
    ),
    "each ragged round forgets those before": Mutant(
        "sparsejax/wire/ragged.py",
        "return first + self.form.room, self.once(first, carry)",
        "return first + self.form.room, self.once(first)",
        f"{EXACT_SUM}::test_every_variant_gives_the_exact_sum",
    ),
    "what exceeds one ragged round is not sent": Mutant(
        "sparsejax/schemes/owners/ragged.py",
        "jnp.where(need <= form.room, 1, 2)",
        "jnp.where(need >= 0, 1, 2)",
        f"{EXACT_SUM}::test_every_variant_gives_the_exact_sum",
    ),
    "ragged entries are sent where they do not pay": Mutant(
        "sparsejax/schemes/owners/ragged.py",
        "pays = known.told.wire + self._most_pulled < self.dense_bytes",
        "pays = known.told.wire < self.dense_bytes",
        f"{EXACT_SUM}::test_every_variant_gives_the_exact_sum",
    ),
    "a ragged exchange counts what stays on the rank": Mutant(
        "sparsejax/schemes/owners/ragged.py",
        "others = lax.iota(jnp.int32, n) != wire.rank",
        "others = lax.iota(jnp.int32, n) >= 0 * wire.rank",
        "tests/laws/test_wire_contract.py",
    ),
    "words of a ragged exchange are written where others' belong": Mutant(
        "sparsejax/wire/collectives.py",
        "there = jnp.broadcast_to(self.rank * words, n)",
        "there = places",
        "tests/wire/test_ragged.py",
    ),
    "an all-to-all counts its own part": Mutant(
        "sparsejax/wire/collectives.py",
        "return received, (n - 1) / n * byte_count(x)",
        "return received, float(byte_count(x))",
        "tests/wire/test_collectives.py tests/laws/test_wire_contract.py",
    ),
    # Schemes.
    "entries are sent where they do not pay": Mutant(
        "sparsejax/schemes/or_dense.py",
        "pays = entry_bytes < dense_bytes",
        "pays = entry_bytes < 2 * dense_bytes",
        EXACT_SUM,
    ),
    "slots of no unit are placed": Mutant(
        "sparsejax/schemes/owners/pulls.py",
        "units = bits.apart(units, slots < self.layout.width, size)",
        "units = bits.apart(units, slots <= self.layout.width, size)",
        "tests/schemes/owners/test_push_pull.py",
    ),
    "what Algorithm 1 leaves over is not sent": Mutant(
        "sparsejax/units/ownership/memory.py",
        "left = total > jnp.sum(places.counts)",
        "left = total < 0",
        "tests/schemes/owners/test_algorithm_1.py",
    ),
    "entries of a hash memory travel by the number of their place": Mutant(
        "sparsejax/schemes/owners/push_pull.py",
        "._replace(names=slots)",
        "",
        "tests/schemes/owners/test_algorithm_1.py",
    ),
    "partial sums are kept wider than they are sent": Mutant(
        "sparsejax/schemes/doubling.py",
        "        total = rounded_to(state.total, dtype)\n        rounded =",
        "        total = state.total\n        rounded =",
        "tests/schemes/test_doubling.py",
    ),
    "a NaN keeps its payload": Mutant(
        "sparsejax/schemes/doubling.py",
        "    x = jnp.where(jnp.isnan(x), jnp.full_like(x, jnp.nan), x)\n",
        "",
        f"tests/schemes/test_doubling.py {EXACT_SUM}",
    ),
    "the dearer of Zen's ways is taken": Mutant(
        "sparsejax/schemes/zen/choice.py",
        "return gathered < self.owner_bytes + ladder.ROUND",
        "return gathered > self.owner_bytes + ladder.ROUND",
        "tests/schemes/zen",
    ),
    "Ok-Topk forgets what others did not keep": Mutant(
        "sparsejax/schemes/top_k/ok_topk.py",
        "left = top_k.residual(accumulated, jnp.where(sent, 0, accumulated), total)",
        "left = jnp.where(sent, 0, accumulated)",
        f"tests/schemes/top_k {CONSERVATION}",
    ),
    "Ok-Topk's state is of a weak type after a step": Mutant(
        "sparsejax/schemes/top_k/ok_topk.py",
        "jnp.float32(_FITTING) * selected",
        "_FITTING * selected",
        "tests/laws/test_state_types.py",
    ),
    "two levels lose what is left out": Mutant(
        "sparsejax/schemes/two_level.py",
        'left = back.at[units[inner.rank]].set(left, mode="drop")',
        "left = back",
        "tests/schemes/test_two_level.py",
    ),
    "PowerSGD keeps what is missing of the sum on each rank": Mutant(
        "sparsejax/schemes/baselines/power_sgd.py",
        "rest = jnp.where(finite, matrices - _times(basis, mine.mT), 0)",
        "rest = jnp.where(finite, matrices - _times(basis, right.mT), 0)",
        "tests/schemes/test_power_sgd.py",
    ),
    "PowerSGD looks no more where there was nothing": Mutant(
        "sparsejax/schemes/baselines/power_sgd.py",
        "ahead = jnp.where(moved, ahead, state.right)",
        "ahead = jnp.where(finite, ahead * moved, state.right)",
        "tests/schemes/test_power_sgd.py",
    ),
    "Zen's three ranks alone send lists of rows to all": Mutant(
        "sparsejax/schemes/zen/zen.py",
        "_FEW = 4",
        "_FEW = 3",
        "tests/schemes/test_row_lists.py",
    ),
    "a residual lacks what the total has not": Mutant(
        "sparsejax/schemes/top_k/base.py",
        "return jnp.where(bits.nonzero(total), left_out, accumulated)",
        "return left_out",
        "tests/schemes/top_k/test_top_k.py",
    ),
    "teams are those with the most time": Mutant(
        "sparsejax/schemes/top_k/spar_dl.py",
        "return min(times, key=lambda teams: times[teams])",
        "return max(times, key=lambda teams: times[teams])",
        "tests/schemes/top_k/test_top_k.py",
    ),
    "the authors' thresholds move by another factor": Mutant(
        "sparsejax/schemes/top_k/ok_topk.py",
        "step: float = 1.012",
        "step: float = 1.02",
        "tests/schemes/top_k/test_top_k.py",
    ),
    # Transformations.
    "indices that were changed are sent": Mutant(
        "sparsejax/transforms/checks.py",
        "    if leaf.origin.is_changed(leaf.indices):\n",
        "    if False:\n",
        "tests/transforms/test_sparsify.py",
    ),
    "running totals do not carry": Mutant(
        "sparsejax/transforms/state/totals.py",
        "carried += ones >> 12",
        "carried += 0 * ones",
        "tests/transforms/state/test_totals.py",
    ),
    "a residual does not come back": Mutant(
        "sparsejax/transforms/feedback.py",
        "return residual + gradient, momentum",
        "return gradient, momentum",
        CONSERVATION,
    ),
    "momentum is not masked": Mutant(
        "sparsejax/transforms/feedback.py",
        "return jnp.where(sent, 0, momentum) if self.masking else momentum",
        "return momentum",
        "tests/laws/test_conservation.py::test_momentum_correction_after_a_dense_warm_up",
    ),
    "leaves that are sent whole have no velocity": Mutant(
        "sparsejax/transforms/feedback.py",
        "if memory is None or (residual is None and momenta[i] is None):",
        "if memory is None or residual is None:",
        "tests/transforms/test_wrappers.py",
    ),
    "of velocities the rows of this batch are sent": Mutant(
        "sparsejax/transforms/exchange.py",
        "ids = None if moving else ids",
        "ids = ids",
        "tests/transforms/test_wrappers.py",
    ),
    "selected entries stay in the residual": Mutant(
        "sparsejax/transforms/select.py",
        'return tensor, x.at[apart].set(error, mode="drop", unique_indices=True)',
        "return tensor, x + 0 * x.at[apart].set(error)",
        CONSERVATION,
    ),
    "every step draws the same entries": Mutant(
        "sparsejax/transforms/select.py",
        "seed = hashing.mix32(step.astype(jnp.uint32), number)",
        "seed = hashing.mix32(jnp.uint32(0), number)",
        "tests/sparsifiers tests/transforms/test_sparsify.py",
    ),
    "a mean is a sum": Mutant(
        "sparsejax/transforms/exchange.py",
        "total = wire.mean_of(reduced.total) if self.mean else reduced.total",
        "total = reduced.total",
        "tests/transforms/test_sync.py",
    ),
    "buckets that were exchanged as one take each other's sums": Mutant(
        "sparsejax/transforms/buckets/joint.py",
        "units=tuple(leaves[i].size for i in places),",
        "units=tuple(leaves[i].size for i in sorted(places)),",
        "tests/transforms/test_joint.py",
    ),
    "what was sent for two buckets counts for each": Mutant(
        "sparsejax/transforms/buckets/joint.py",
        "return [count - sum(others), *others]",
        "return [count, *others]",
        "tests/transforms/test_joint.py",
    ),
    "a state that buckets share stands in it twice": Mutant(
        "sparsejax/transforms/buckets/joint.py",
        "same = lambda new, given, own: own if new is given else new",
        "same = lambda new, given, own: new",
        "tests/transforms/test_joint.py",
    ),
    "buckets are exchanged one by one": Mutant(
        "sparsejax/transforms/buckets/joint.py",
        "    return bucket.scheme, dtype, over, all(of_leaves), structure, shapes",
        "    return bucket, dtype, over, all(of_leaves), structure, shapes",
        "tests/transforms/test_joint.py",
    ),
    "a gradient that was summed is taken for local": Mutant(
        "sparsejax/transforms/checks.py",
        "        axes.require_local(path, tree.numbers(leaf), axis)\n",
        "",
        "tests/transforms/test_sync.py tests/laws/test_bad_input.py",
    ),
    "what rounding takes from a sum is lost": Mutant(
        "sparsejax/transforms/wrappers/sleeping.py",
        "scale * tree.rounding_error(total[0] / scale, x)[None]",
        "jnp.zeros_like(total)",
        "tests/transforms/test_wrappers.py",
    ),
    "the chain runs at the first of k steps": Mutant(
        "sparsejax/transforms/wrappers/sleeping.py",
        "is_due = state.step % every == every - 1",
        "is_due = state.step % every == 0",
        "tests/transforms/test_wrappers.py",
    ),
    "warm-up lasts a step longer": Mutant(
        "sparsejax/transforms/wrappers/sleeping.py",
        "out, inner = axes.cond(state.step < steps,",
        "out, inner = axes.cond(state.step <= steps,",
        "tests/laws/test_conservation.py::test_momentum_correction_after_a_dense_warm_up",
    ),
    "infinities are not skipped": Mutant(
        "sparsejax/transforms/state/alike/numbers.py",
        "is_bad = jnp.any(~jnp.isfinite(x))",
        "is_bad = jnp.any(jnp.isnan(x))",
        "tests/transforms/test_wrappers.py",
    ),
    "a sum that is too large for 16 bits is kept": Mutant(
        "sparsejax/transforms/state/alike/numbers.py",
        "jnp.array(numbers, jnp.int32)[sums.over]",
        "jnp.array(numbers, jnp.int32)[0 * sums.over]",
        BAD_NUMBERS,
    ),
    "an error names another rank than the first": Mutant(
        "sparsejax/transforms/state/alike/numbers.py",
        "rank = jnp.argmax(is_bad)",
        "rank = is_bad.size - 1 - jnp.argmax(is_bad[::-1])",
        BAD_NUMBERS,
    ),
    "a threshold that is no number is used again": Mutant(
        "sparsejax/sparsifiers/reuse_threshold.py",
        "return jnp.where(jnp.isfinite(moved), moved, 0)",
        "return moved",
        f"{BAD_NUMBERS}::test_a_threshold_that_is_no_number_is_used_once",
    ),
    "a NaN spoils all that is rounded with it": Mutant(
        "sparsejax/transforms/select.py",
        "few_bits = self.sparsifier.rounded(jnp.where(finite, x, 0), draw)",
        "few_bits = self.sparsifier.rounded(x, draw)",
        BAD_NUMBERS,
    ),
    "who can read a checkpoint goes on where another cannot": Mutant(
        "sparsejax/transforms/state/checkpoints/together.py",
        "    if not wrong:\n        return part\n",
        "    if failed is None:\n        return part\n",
        "tests/transforms/state/checkpoints/test_together.py",
    ),
    "what RandomK has not drawn loses its NaN": Mutant(
        "sparsejax/transforms/select.py",
        "error = tree.rounding_error(values, sent)\n        return tensor, x.at",
        "error = tree.rounding_error(values, sent)\n"
        "        x = jnp.where(jnp.isfinite(x), x, 0)\n        return tensor, x.at",
        "tests/transforms/test_late_numbers.py",
    ),
    "two processes 0 of one host do not see each other": Mutant(
        "sparsejax/advise/doctor/roll.py",
        "        _ask_another(port, host)\n",
        "",
        DOCTOR,
    ),
    "a step that is left out changes variables": Mutant(
        "sparsejax/training/numbers.py",
        "is_left_out = after.skipped > before.skipped",
        "is_left_out = after.skipped < before.skipped",
        "tests/training/test_bad_numbers.py",
    ),
    "a step that was left out raises again": Mutant(
        "sparsejax/training/numbers.py",
        "since=int(np.asarray(tree.here(own.found.step))) - 1",
        "since=0",
        "tests/training/test_bad_numbers.py",
    ),
    "a rank clips as if it were alone": Mutant(
        "sparsejax/transforms/wrappers/clipping.py",
        "most = norm * wire.ranks**-0.5",
        "most = norm * 1.0",
        "tests/transforms",
    ),
    "fewer ranks inherit too little": Mutant(
        "sparsejax/transforms/state/checkpoints/resizing.py",
        "share = share / (len(x) if mean else len(fresh))",
        "share = share / len(fresh)",
        "tests/transforms",
    ),
    "data_parallel differentiates what is replicated": Mutant(
        "sparsejax/training/on_rank/program.py",
        "params = axes.local(before[0], wire.axis)\n        seen",
        "params = before[0]\n        seen",
        "tests/test_smoke.py tests/training",
    ),
    "leaves a number short of the least are sent sparsely": Mutant(
        "sparsejax/transforms/buckets/assignment.py",
        "SPARSE_FROM = 1 << 16",
        "SPARSE_FROM = (1 << 16) - 1",
        "tests/laws/test_bad_input.py",
    ),
    "smaller leaves are sparsified": Mutant(
        "sparsejax/transforms/sparsify.py",
        "min_size: int = SPARSE_FROM,",
        "min_size: int = SPARSE_FROM // 2,",
        "tests/transforms/test_sparsify.py",
    ),
    "each rank is clipped at the norm of all": Mutant(
        "sparsejax/transforms/wrappers/clipping.py",
        "most = norm * wire.ranks**-0.5",
        "most = norm",
        "tests/transforms/test_wrappers.py",
    ),
    "an infinite number clips all others": Mutant(
        "sparsejax/transforms/wrappers/clipping.py",
        "jnp.where(jnp.isfinite(x), x, 0) for",
        "jnp.where(jnp.isnan(x), 0, x) for",
        "tests/transforms/test_wrappers.py",
    ),
    "sums are looked at whatever their dtype": Mutant(
        "sparsejax/transforms/state/alike/numbers.py",
        "least > 1e38",
        "least > 1e40",
        BAD_NUMBERS,
    ),
    "a sum that is carried is summed twice": Mutant(
        "sparsejax/embrace/horizontal/schedule.py",
        "    axes.require_local(path, leaf, wire.axis)\n",
        "",
        "tests/laws/test_bad_input.py",
    ),
    # Rows that are held back.
    "late rows have the learning rate of a later step": Mutant(
        "sparsejax/rows/updates/inside.py",
        "inner[j] = inner[j] - jnp.ones((), inner[j].dtype)",
        "pass",
        "tests/rows/updates/test_late.py",
    ),
    "late rows are lost where arrays are wanted": Mutant(
        "sparsejax/units/row_grads.py",
        'self._refuse("a gradient of rows")\n\n    def merged',
        "return self.now.to_dense()\n\n    def merged",
        "tests/rows/updates/test_late.py",
    ),
    "a row waits on one rank and goes on another": Mutant(
        "sparsejax/embrace/vertical/split.py",
        "may_wait & ~among(ids, jnp.where(over, ids, height), height)",
        "may_wait & ~over",
        VERTICAL,
    ),
    "rows that are read next wait": Mutant(
        "sparsejax/embrace/vertical/split.py",
        "may_wait = real & ~among(ids, next_ids, height)",
        "may_wait = real",
        VERTICAL,
    ),
    "delayed rows wait for the loss": Mutant(
        "sparsejax/embrace/vertical/sync.py",
        "late, of_late = sending.columns_of(wire, rows)",
        "rows = [x + 0 * jnp.sum(t.value.rows) for x, t in zip(rows, self.tables)]\n"
        "            late, of_late = sending.columns_of(wire, rows)",
        f"{VERTICAL}::test_nothing_waits_for_delayed_rows_and_they_wait_for_nothing",
    ),
    "a table in a model of nnx has two paths": Mutant(
        "sparsejax/transforms/state/tree.py",
        "while keys[1:] and keys[-1] == boxed",
        "if keys[1:] and keys[-1] == boxed",
        "tests/embrace/test_flax.py",
    ),
    "a loss that cannot be traced uses a state up": Mutant(
        "sparsejax/training/trainer.py",
        "step.eval_shape(state, *batches)",
        "pass",
        f"{VERTICAL}::test_a_batch_that_does_not_fit_uses_up_no_state",
    ),
    "rows that stay are sent backward as well": Mutant(
        "sparsejax/embrace/column_lookup.py",
        "(primals[0], tangents[1]))",
        "(primals[0], tangents[0] + tangents[1]))",
        f"{VERTICAL}::test_nothing_waits_for_delayed_rows_and_they_wait_for_nothing",
    ),
    "a flush leaves what it has applied": Mutant(
        "sparsejax/embrace/vertical/flushing.py",
        "ids = jnp.full_like(x.ids, x.height)",
        "ids = x.ids",
        "tests/embrace/test_vertical_by_hand.py",
    ),
    "late rows of a mean are a sum": Mutant(
        "sparsejax/embrace/vertical/sync.py",
        "rows = self.wire.mean_of(rows) if self.of.mean else rows",
        "pass",
        f"{VERTICAL}::test_it_is_training_without_a_schedule",
    ),
    "what is held back counts as by as many ranks": Mutant(
        "sparsejax/transforms/state/pending.py",
        "sums = sums * (ranks / len(ids) if mean else 1)",
        "pass",
        f"{VERTICAL}::test_what_ranks_hold_back_is_the_same_by_other_ranks",
    ),
    "any batch is the one that was told": Mutant(
        "sparsejax/training/ahead.py",
        "if self._batch is None or _are_same(batch, self._batch):",
        "if True:",
        f"{VERTICAL}::test_a_step_is_told_its_batch_or_flushes",
    ),
    "a batch of other leaves is the one that was told": Mutant(
        "sparsejax/training/ahead.py",
        "    if jax.tree.structure(ours) != jax.tree.structure(theirs):\n",
        "    if False:\n",
        f"{VERTICAL}::test_a_step_is_told_its_batch_or_flushes",
    ),
    "a batch that does not fit uses up the state": Mutant(
        "sparsejax/training/trainer.py",
        "        batches = list(map(self._batches.placed, batches))\n",
        "        self.flush(state) if is_ahead else None\n"
        "        batches = list(map(self._batches.placed, batches))\n",
        f"{VERTICAL}::test_a_batch_that_does_not_fit_uses_up_no_state",
    ),
    "rows beside blocks stay late behind a flush": Mutant(
        "sparsejax/training/on_rank/halves.py",
        "return rows.settle(params, opt_state, lazy[0])",
        "return params, opt_state",
        "tests/embrace/horizontal/test_training.py",
    ),
    "a settled row is late": Mutant(
        "sparsejax/rows/updates/lazy.py",
        "if not flushed and find(state, Pending):",
        "if False:",
        "tests/embrace/test_vertical_by_hand.py",
    ),
    "bits of a message are added as floats": Mutant(
        "pallas_kernels/pallas/launch.py",
        "triton_backend().atomic_or(",
        "triton_backend().atomic_add(",
        "tests/kernels/test_lowered.py",
    ),
    "JAX 0.11 is to launch PTX": Mutant(
        "pallas_kernels/triton/launch.py",
        "LAUNCHES_PTX = (0, 12)",
        "LAUNCHES_PTX = (0, 11)",
        "tests/kernels/test_launch.py",
    ),
    "a launch lacks the pointers that Triton adds": Mutant(
        "pallas_kernels/triton/launch.py",
        "            *[buffers[0]] * own,\n",
        "",
        "tests/kernels/test_launch.py",
    ),
    "a launch zeroes what it works on in place": Mutant(
        "pallas_kernels/triton/launch.py",
        "for buffer in buffers[read + len(one.in_place) :]:",
        "for buffer in buffers[read : read + len(one.in_place)]:",
        "tests/kernels/test_launch.py",
    ),
    "what a launch works on in place is another copy": Mutant(
        "pallas_kernels/triton/launch.py",
        "run(*operands, *works, *works, *made)",
        "run(*operands, *in_place, *works, *made)",
        "tests/kernels/test_launch.py",
    ),
    "PTX is compiled for what is described, on any GPU": Mutant(
        "pallas_kernels/backends.py",
        "    if asked and asked.compile_only:\n        return COMPUTE_CAPABILITY\n",
        "    return COMPUTE_CAPABILITY\n",
        "tests/kernels/test_launch.py",
    ),
    "sums of integers are Pallas'": Mutant(
        "pallas_kernels/operations/messages.py",
        "_ADDED_IN_PALLAS = (jnp.float32, jnp.float16)",
        "_ADDED_IN_PALLAS = (jnp.float32, jnp.float16, jnp.int32, jnp.uint32)",
        "tests/kernels/test_lowered.py",
    ),
    "prior rows have seven lengths": Mutant(
        "sparsejax/embrace/vertical/sending.py",
        "_LENGTHS = (1, 2, 3, 4,",
        "_LENGTHS = (1, 2, 4,",
        VERTICAL,
    ),
    # Small tables.
    "rows of small tables are made dense": Mutant(
        "sparsejax/transforms/buckets/tables.py",
        "    return [is_enough and of_one > 0 for of_one in saved]",
        "    return [False for of_one in saved]",
        "tests/transforms/test_small_tables.py",
    ),
    "rows of small tables are listed whatever they cost": Mutant(
        "sparsejax/transforms/buckets/tables.py",
        "    return [is_enough and of_one > 0 for of_one in saved]",
        "    return [True for of_one in saved]",
        "tests/transforms/test_small_tables.py",
    ),
    "a rule without effect is taken": Mutant(
        "sparsejax/transforms/buckets/assignment.py",
        "            if value in _UNITS and are_dense:",
        "            if value in _UNITS and not are_dense:",
        "tests/transforms/test_small_tables.py",
    ),
    "a rule behind those that hold for all its leaves is taken": Mutant(
        "sparsejax/transforms/buckets/assignment.py",
        "if pattern in earlier or is_default:",
        "if earlier:",
        "tests/transforms/test_rules.py",
    ),
    "a rule for the rest must find some": Mutant(
        "sparsejax/transforms/buckets/assignment.py",
        "if pattern in earlier or is_default:",
        "if pattern in earlier:",
        "tests/transforms/test_rules.py",
    ),
    "a loss that is reduced over the ranks is trained": Mutant(
        "sparsejax/training/on_rank/program.py",
        "if missing and axes.is_checking(axis_name):",
        "if False:",
        "tests/training/test_coupled_losses.py",
    ),
    "gradients of equal ids of a column table are added in any order": Mutant(
        "sparsejax/embrace/column_lookup.py",
        "return add_repeated(zeros, places, g), np.zeros",
        'return zeros.at[places].add(g, mode="drop"), np.zeros',
        "tests/laws/test_ordered_sums.py",
    ),
    "units that threads place are summed for copies": Mutant(
        "sparsejax/wire/ordered.py",
        "if is_elsewhere() and (wire.deterministic or copies(wire, over)):",
        "if False:",
        "tests/laws/test_ordered_sums.py",
    ),
    "each small table has to save what an exchange costs": Mutant(
        "sparsejax/transforms/buckets/tables.py",
        "sum(max(of_one, 0.0) for of_one in saved)",
        "max([0.0, *saved])",
        "tests/transforms/test_small_tables.py",
    ),
    "rows of small tables are listed for what saves less": Mutant(
        "sparsejax/transforms/buckets/tables.py",
        "LISTED_FROM = ROUND // 16",
        "LISTED_FROM = ROUND // 17",
        "tests/transforms/test_small_tables.py",
    ),
    # Shards over the axis of the ranks.
    "parameters that vary over the ranks are synchronized": Mutant(
        "sparsejax/transforms/checks.py",
        "        over = sorted(axes.varying_axes(leaf) & set(names))\n",
        "        over: list[str] = []\n",
        "tests/transforms/state/test_sharded_over_ranks.py",
    ),
    "a shard over one of the axes of the ranks is not known for one": Mutant(
        "sparsejax/transforms/checks.py",
        "    sizes = {repr(name): lax.axis_size(name) for name in names}\n",
        "    sizes = dict.fromkeys(map(repr, names), wire.ranks)\n",
        "tests/transforms/state/test_sharded_over_ranks.py",
    ),
    "a state of whole parameters is one of their shards": Mutant(
        "sparsejax/transforms/exchange.py",
        "        state.leaves.check(paths, leaves, wire)\n",
        "",
        "tests/transforms/state/test_sharded_over_ranks.py",
    ),
    # Rows.
    "a row that there is not gets a gradient": Mutant(
        "sparsejax/rows/reads.py",
        "listed = jnp.where(inside, ids, height)",
        "listed = ids",
        "tests/rows/test_value_and_grad.py::test_gradients_are_those_of_jax[out_of_range]",
    ),
    "a row that was read for an id out of range is trained": Mutant(
        "sparsejax/rows/reads.py",
        "if mode == GatherScatterMode.CLIP:",
        "if mode != GatherScatterMode.FILL_OR_DROP:",
        "tests/rows/test_out_of_range.py",
    ),
    "a late row gets the gradient of an id out of range": Mutant(
        "sparsejax/rows/updates/view.py",
        "places = jnp.where(is_listed, merge.places, merge.ids.shape[0])",
        "places = jnp.where(is_listed, merge.places, merge.places)",
        "tests/rows/test_out_of_range.py",
    ),
    "memory is looked through": Mutant(
        "sparsejax/rows/programs.py",
        'return any("Ref" in',
        'return any("-" in',
        "tests/rows/test_value_and_grad.py::test_gradients_are_those_of_jax[by_way_of_memory]",
    ),
    "the next turn needs nothing": Mutant(
        "sparsejax/rows/reading.py",
        "more = [w or any(carried[k : k + 1]) for k, w in enumerate(wanted)]",
        "more = wanted",
        "tests/rows/test_value_and_grad.py",
    ),
    "a carried table may be replaced": Mutant(
        "sparsejax/rows/reading.py",
        "[x for x, y in zip(carry, made, strict=False) if x is not y]",
        "[]",
        "tests/rows/test_value_and_grad.py",
    ),
    "a branch is given the rows of another": Mutant(
        "sparsejax/rows/replay.py",
        "before = sum(map(len, sites[:k]))",
        "before = 0",
        "tests/rows/test_value_and_grad.py",
    ),
    "what all ranks have read counts on each": Mutant(
        "sparsejax/rows/value_and_grad.py",
        "        if same:\n",
        "        if False:\n",
        "tests/rows/test_ranks.py",
    ),
    "a row catches up on a step too few": Mutant(
        "sparsejax/rows/updates/catch_up.py",
        "return lax.fori_loop(as_varying(first, types), count + 1, one_step, rows)",
        "return lax.fori_loop(as_varying(first, types), count, one_step, rows)",
        "tests/rows/updates/test_lazy.py",
    ),
    "a step that was missed has the learning rate of now": Mutant(
        "sparsejax/rows/updates/catch_up.py",
        "state[j] = state[j] - (self.count - step + 1).astype(state[j].dtype)",
        "pass",
        "tests/rows/updates/test_lazy.py tests/rows/updates/test_fading.py",
    ),
    "a norm of all rows is taken for one of each": Mutant(
        "sparsejax/rows/updates/facts/values.py",
        "return None if axis in axes else axis - sum(other < axis for other in axes)",
        "return axis - sum(other < axis for other in axes)",
        "tests/rows/updates/test_refused.py",
    ),
    "tables of two types are caught up in one loop": Mutant(
        "sparsejax/rows/updates/catch_up.py",
        "alike.setdefault(types, {})[at] = as_varying(part, types)",
        "alike.setdefault(frozenset(), {})[at] = part",
        "tests/rows/updates/test_types.py",
    ),
    "fewer values of a rate are remembered": Mutant(
        "sparsejax/rows/updates/catch_up.py",
        "_CHANGES = 64",
        "_CHANGES = 59",
        "tests/rows/updates/test_lazy.py",
    ),
    # EmbRace's formulas.
    "ids that are gathered are not counted": Mutant(
        "sparsejax/advise/papers/embrace.py",
        "return Cost(3 * (n - 1), rows + (n - 1) * reads.distinct * reads.id_bytes)",
        "return Cost(3 * (n - 1), rows)",
        "tests/advise/papers/test_embrace.py",
    ),
    "owners send back what one rank has read": Mutant(
        "sparsejax/advise/papers/embrace.py",
        "return Cost(2 * (n - 1), (n - 1) / n * (reads.distinct + reads.union) * entry)",
        "return Cost(2 * (n - 1), (n - 1) / n * 2 * reads.distinct * entry)",
        "tests/advise/papers/test_embrace.py",
    ),
    "a lookup's vectors are counted by their room": Mutant(
        "sparsejax/embrace/column_lookup.py",
        "rows = (n - 1) / n * dtype.itemsize * jnp.sum(most * dims)",
        "rows = of_rows",
        "tests/advise/papers/test_embrace.py",
    ),
    "columns are reckoned without their ids": Mutant(
        "sparsejax/advise/explain/columns.py",
        "distinct, union, number)",
        "distinct, union, number, 0)",
        "tests/advise/test_explain.py",
    ),
    # EmbRace's figures.
    "a word counts as often as it is said": Mutant(
        "benchmarks/papers/embrace/bleu.py",
        "found += (own & there).total()",
        "found += sum(own[run] for run in own if run in there)",
        "tests/bench/test_embrace.py",
    ),
    "rows are prior that the rank itself reads next": Mutant(
        "benchmarks/papers/embrace/sizes.py",
        "for own in now:",
        "for own, again in zip(now, (x[name] for x in then), strict=True):",
        "tests/bench/test_embrace.py",
    ),
    "stall is what a step takes beyond that of any system alone": Mutant(
        "benchmarks/papers/embrace/network.py",
        'step[ALONE + SYSTEMS[row["scheme"]].alike]',
        "min(step.values())",
        "tests/bench/test_embrace.py",
    ),
    "a padded word of a sentence is attended to": Mutant(
        "benchmarks/papers/embrace/translator.py",
        'block["cross"], _even(x), meaning, there[:, None, :])',
        'block["cross"], _even(x), meaning, earlier[:, :, :1])',
        "tests/bench/test_embrace.py",
    ),
    # Tables by columns.
    "columns that are summed already are no mean": Mutant(
        "sparsejax/transforms/state/sharded.py",
        "return wire.mean_of(leaf) if mean else leaf",
        "return leaf",
        "tests/embrace/test_training.py",
    ),
    "rows of columns that are summed already are no mean": Mutant(
        "sparsejax/transforms/state/sharded.py",
        "rows = wire.mean_of(leaf.rows) if mean else leaf.rows",
        "rows = leaf.rows",
        "tests/embrace/test_training.py",
    ),
    "columns count alike though ranks have weights": Mutant(
        "sparsejax/training/on_rank/by_rows.py",
        "one = lambda node: node.with_weight(weight) if sharded.is_sharded(node) else node",
        "one = lambda node: node",
        "tests/embrace/test_training.py",
    ),
    "columns are weighed again": Mutant(
        "sparsejax/training/on_rank/by_rows.py",
        "        if sharded.is_sharded(leaf):\n            return leaf\n",
        "",
        "tests/embrace/test_training.py",
    ),
    "a rank without data lists rows of columns": Mutant(
        "sparsejax/embrace/column_lookup.py",
        "ids = jnp.where(read.table.weight == 0, height, ids)",
        "pass",
        "tests/embrace/test_column_lookup.py",
    ),
    "ids out of range are the last row of a table by columns": Mutant(
        "sparsejax/embrace/column_lookup.py",
        "return jnp.where(self.is_there[..., None], found, fill)",
        "return found",
        "tests/embrace/test_column_lookup.py",
    ),
    "ids do not count from the end of a table by columns": Mutant(
        "sparsejax/embrace/column_lookup.py",
        "ids = jnp.where(ids < 0, ids + height, ids)",
        "pass",
        "tests/embrace/test_column_lookup.py",
    ),
    "columns are put together in another order": Mutant(
        "sparsejax/embrace/exchange.py",
        "jnp.moveaxis(x, 0, 1).reshape(",
        "jnp.moveaxis(x[::-1], 0, 1).reshape(",
        "tests/embrace/test_column_lookup.py",
    ),
    "ids that do not fit are left out": Mutant(
        "sparsejax/embrace/exchange.py",
        "return most <= 0, sent",
        "return most <= 8, sent",
        "tests/embrace/test_column_lookup.py",
    ),
    "columns are sent without their ids being counted": Mutant(
        "sparsejax/embrace/column_lookup.py",
        "pull = Stage(of_ids + of_rows,",
        "pull = Stage(of_rows,",
        "tests/embrace/test_column_lookup.py",
    ),
    "gradients of equal ids add up in 16 bits": Mutant(
        "sparsejax/embrace/column_lookup.py",
        "distinct.astype(wide(dtype))",
        "distinct",
        "tests/embrace/test_column_lookup.py",
    ),
    "columns move by one when they go to other ranks": Mutant(
        "sparsejax/embrace/column_table.py",
        "return _filled_up(x[:, : self.dim], shape[1], np)",
        "return _filled_up(x[:, 1 : self.dim], shape[1], np)",
        "tests/embrace/test_training.py",
    ),
    "a number a row of columns is taken for that of the whole row": Mutant(
        "sparsejax/embrace/column_table.py",
        "if len(shape) >= 2 or jnp.issubdtype(jnp.result_type(x), jnp.floating):",
        "if False:",
        "tests/embrace/test_bad_input.py",
    ),
    "columns over other ranks are taken for those of these": Mutant(
        "sparsejax/transforms/state/sharded.py",
        "    if own != wanted:\n",
        "    if False:\n",
        "tests/embrace/test_bad_input.py",
    ),
    # Gradients that are carried into the next step.
    "reductions of blocks are not kept apart": Mutant(
        "sparsejax/embrace/horizontal/schedule.py",
        "    if not before:\n        return grads",
        "    if True:\n        return grads",
        "tests/embrace/horizontal/test_schedule.py",
    ),
    "blocks are reduced in the order of their names": Mutant(
        "sparsejax/embrace/horizontal/schedule.py",
        "            sequence = blocks.ordered(cut.blocks, names)",
        "            blocks.ordered(cut.blocks, names)",
        "tests/embrace/horizontal/test_schedule.py",
    ),
    "a step that carries nothing updates parameters": Mutant(
        "sparsejax/embrace/horizontal/schedule.py",
        "jnp.where(held, x, y), new, old)",
        "x, new, old)",
        "tests/embrace/horizontal/test_training.py",
    ),
    "what is flushed is applied again": Mutant(
        "sparsejax/embrace/horizontal/schedule.py",
        "return params, HorizontalState(jnp.int32(0), carried,",
        "return params, HorizontalState(jnp.int32(1), carried,",
        "tests/embrace/horizontal/test_training.py",
    ),
    "an update of what is carried takes the sign of zeros": Mutant(
        "sparsejax/embrace/horizontal/schedule.py",
        "jnp.full(leaf.shape, -0.0, leaf.dtype)",
        "jnp.full(leaf.shape, 0.0, leaf.dtype)",
        "tests/embrace/horizontal/test_states.py",
    ),
    "what is not carried is not updated": Mutant(
        "sparsejax/embrace/horizontal/schedule.py",
        "            made = cut.merged(sent, others)\n",
        "            made = cut.merged(sent, jax.tree.map(jnp.zeros_like, others))\n",
        "tests/embrace/horizontal/test_states.py",
    ),
    "parameters are evaluated an update behind": Mutant(
        "sparsejax/training/on_rank/halves.py",
        "    return tx.flush(params, opt_state, of_rest)\n",
        "    return params, tx.flush(params, opt_state, of_rest)[1]\n",
        "tests/embrace/horizontal/test_training.py",
    ),
    "a cast of parameters is their first use": Mutant(
        "sparsejax/embrace/horizontal/first_use.py",
        "        if value.data:\n",
        "        if True:\n",
        "tests/embrace/horizontal/test_first_use.py",
    ),
    "what a loop carries never meets data": Mutant(
        "sparsejax/embrace/horizontal/first_use.py",
        "            given = again\n",
        "            return self.follow(body, given)\n",
        "tests/embrace/horizontal/test_first_use.py",
    ),
    "a chain may look over all leaves": Mutant(
        "sparsejax/embrace/horizontal/independence.py",
        "    if len(value.blocks) < 2:\n",
        "    if True:\n",
        "tests/embrace/horizontal/test_states.py",
    ),
    "a synchronization hides what stands in front of it": Mutant(
        "sparsejax/transforms/exchange.py",
        "wire.assume_same(tree.to_dense(leaf)) for",
        "wire.assume_same(jnp.zeros_like(tree.to_dense(leaf))) for",
        "tests/embrace/horizontal/test_states.py",
    ),
    "a sparsifier hides what stands in front of it": Mutant(
        "sparsejax/transforms/select.py",
        "values = jnp.full(room, jnp.sum(leaf), leaf.dtype)",
        "values = jnp.zeros_like(leaf.reshape(-1), shape=(room,))",
        "tests/embrace/horizontal/test_states.py",
    ),
    "a leaf is in two blocks": Mutant(
        "sparsejax/embrace/horizontal/blocks.py",
        "        if len(found) > 1:\n",
        "        if False:\n",
        "tests/embrace/horizontal/test_states.py",
    ),
    "a leaf is in no block": Mutant(
        "sparsejax/embrace/horizontal/blocks.py",
        "    if missed:\n",
        "    if False:\n",
        "tests/embrace/horizontal/test_states.py",
    ),
    "an exchange of no leaves forgets what was sent": Mutant(
        "sparsejax/transforms/state/totals.py",
        "jnp.concatenate([self.exchanges[None] + 1, self.counts[1:]])",
        "jnp.concatenate([self.exchanges[None] + 1, 0 * self.counts[1:]])",
        "tests/transforms/state/test_totals.py",
    ),
    "a lookup reads rows that are late": Mutant(
        "sparsejax/rows/replay.py",
        "if self.read is None:\n            return eqn",
        "if True:\n            return eqn",
        "tests/rows/updates",
    ),
    "the last tile of a list is left out": Mutant(
        "sparsejax/rows/tiles.py",
        "lax.div(count + (lengths[at] - 1), np.int32(lengths[at]))",
        "lax.div(count, np.int32(lengths[at]))",
        "tests/rows/updates/test_in_tiles.py",
    ),
    "rows that were read at another state are those of this one": Mutant(
        "sparsejax/rows/updates/view.py",
        " or not view.is_same(self._view, at)",
        "",
        "tests/rows/updates/test_in_tiles.py",
    ),
    "what a momentum has moved does not decay with the weights": Mutant(
        "sparsejax/rows/updates/fading/fading.py",
        "weights = weights * self._shrunk(jnp.maximum(follow, 0))",
        "pass",
        "tests/rows/updates/test_fading.py",
    ),
    "a sum is kept a step too early": Mutant(
        "sparsejax/rows/updates/fading/fading.py",
        "        step = count - self.terms\n",
        "        step = count - self.terms + 1\n",
        "tests/rows/updates/test_fading.py",
    ),
    "places of sums that are kept are not used again": Mutant(
        "sparsejax/rows/updates/fading/fading.py",
        "lax.rem(step, np.int32(PATIENCE)), PATIENCE)",
        "step, PATIENCE)",
        "tests/rows/updates/test_fading.py",
    ),
    "constants of an optimizer do not count when sums are shared": Mutant(
        "sparsejax/rows/updates/inside.py",
        "consts, *_constants(self.program.jaxpr)]",
        "consts]",
        "tests/rows/updates/test_fading.py",
    ),
    "rows wait for longer than sums are kept": Mutant(
        "sparsejax/rows/updates/fading/fading.py",
        "ids = lax.rem(step, np.int32(turns)) * some",
        "ids = lax.rem(step, np.int32(turns + 1)) * some",
        "tests/rows/updates/test_fading.py",
    ),
    "unused rows are merged into the last": Mutant(
        "pallas_kernels/reference/indices.py",
        "return found, jnp.where(keys < nowhere, where, capacity)",
        "return found, where",
        "tests/units/test_row_grads.py",
    ),
    "a list of rows is cut short": Mutant(
        "sparsejax/schemes/row_lists.py",
        "return jnp.sum(jnp.array(sizes, jnp.int32) < need, dtype=jnp.int32)",
        "return jnp.int32(0)",
        "tests/laws/test_exact_rows.py",
    ),
    "a run of rows is put over another": Mutant(
        "sparsejax/schemes/row_lists.py",
        "rows = lax.dynamic_update_slice(rows, run, (0, first, 0))",
        "rows = lax.dynamic_update_slice(rows, run, (0, 0, 0))",
        "tests/schemes/owners/test_rows.py",
    ),
    "the last run of numbers is not received": Mutant(
        "sparsejax/schemes/owners/rows.py",
        "lax.fori_loop(0, -(-width // some), turn, empty)",
        "lax.fori_loop(0, width // some, turn, empty)",
        "tests/schemes/owners/test_rows.py",
    ),
    "pieces of a message are not counted": Mutant(
        "sparsejax/wire/messages.py",
        "if pieces is not None:",
        "if False:",
        "tests/wire/test_at_once.py",
    ),
    "a table that is fuller than the others is cut short": Mutant(
        "sparsejax/schemes/owners/rows.py",
        "fuller = jnp.where(jnp.any(lists.counts > rooms), self.room + 1, 0)",
        "fuller = jnp.max(rooms) * 0",
        "tests/schemes/owners/test_rows.py",
    ),
    "tables of one exchange have the same slots": Mutant(
        "sparsejax/schemes/owners/rows.py",
        "place = parts * self.width + (start + slots)",
        "place = parts * self.width + (0 * start + slots)",
        "tests/schemes/owners/test_rows.py",
    ),
    "rows of zeros are not there": Mutant(
        "sparsejax/schemes/row_lists.py",
        "else grads.merged()\n    lists =",
        "else grads.merged()\n    merged = dataclasses.replace(merged, ids="
        "jnp.where(jnp.any(merged.rows != 0, 1), merged.ids, height))\n    lists =",
        "tests/laws/test_exact_rows.py",
    ),
    "entries that are there twice are taken for distinct": Mutant(
        "sparsejax/units/row_grads.py",
        "(bits.members(_bits_of(ids[None], nowhere)) == number)",
        "(number >= 0)",
        "tests/units/test_row_grads.py",
    ),
    "a key of two lists is a key of neither": Mutant(
        "sparsejax/units/row_grads.py",
        "np.uint32(0), lax.bitwise_or, (0,)",
        "np.uint32(0), lax.bitwise_xor, (0,)",
        "tests/units/test_row_grads.py",
    ),
    "rows are added up and not averaged": Mutant(
        "sparsejax/transforms/exchange.py",
        "rows = wire.mean_of(total.rows) if self.mean else total.rows",
        "rows = total.rows",
        "tests/transforms/test_rows_exchange.py",
    ),
    "ids that were scaled are ids": Mutant(
        "sparsejax/units/row_grads.py",
        "if self.origin.is_changed(self.ids):",
        "if False:",
        "tests/transforms/test_rows_exchange.py",
    ),
    "rows that are listed twice have two norms": Mutant(
        "sparsejax/transforms/wrappers/clipping.py",
        "[leaf.merged() if is_row_grads(leaf) else leaf for leaf in leaves]",
        "[leaf if is_row_grads(leaf) else leaf for leaf in leaves]",
        "tests/training/test_by_rows.py",
    ),
    "a rank without data lists rows": Mutant(
        "sparsejax/training/on_rank/by_rows.py",
        "ids = jnp.where(share.weight == 0, leaf.shape[0], comparable(leaf.ids))",
        "ids = leaf.ids",
        "tests/training/test_by_rows.py",
    ),
    "an optimizer in front of the exchange takes rows": Mutant(
        "sparsejax/training/on_rank/by_rows.py",
        "for exchange in seen.exchanges[: part.behind]",
        "for exchange in seen.exchanges",
        "tests/training/test_by_rows.py",
    ),
    "a list that is one row too long fits": Mutant(
        "sparsejax/rows/capacity.py",
        "fits = _most(over, axis_name) <= 0",
        "fits = _most(over, axis_name) <= 1",
        "tests/rows/test_capacity.py",
    ),
    "a step whose rows do not fit is left out": Mutant(
        "sparsejax/rows/capacity.py",
        "lax.fori_loop(0, 1 - times, turn(False), carry)",
        "lax.fori_loop(0, 0 * times, turn(False), carry)",
        "tests/rows/test_capacity.py",
    ),
    "longer lists are merged in front of both steps": Mutant(
        "sparsejax/rows/capacity.py",
        "arrays, _ = lax.optimization_barrier((arrays, number))",
        "pass",
        "tests/rows/test_capacity.py",
    ),
    "ids that were scaled behind a lazy optimizer are ids": Mutant(
        "sparsejax/rows/updates/steps.py",
        "RowGrads.marked(x.merge.ids, made[at], step.grads[at].shape)",
        "RowGrads(x.merge.ids, made[at], step.grads[at].shape)",
        "tests/rows/updates/test_in_place.py",
    ),
    "a lazy optimizer has all leaves": Mutant(
        "sparsejax/rows/updates/inside.py",
        "for structure, paths in self.starts.items():",
        "for structure, paths in ():",
        "tests/rows/updates/test_in_place.py",
    ),
    "a host's rows are not added up inside": Mutant(
        "sparsejax/schemes/two_level.py",
        "if across is None or inner.ranks == 1:",
        "if across is None or inner.ranks > 1:",
        "tests/transforms/test_rows_exchange.py",
    ),
    # Advice.
    "a forecast forgets a message": Mutant(
        "sparsejax/schemes/owners/forecast.py",
        "pushed, rounds, capacity = sent_bytes(push_steps, need, n - 1)",
        "pushed, rounds, capacity = sent_bytes(push_steps, need, n - 2)",
        "tests/laws/test_forecast.py",
    ),
    "lists of rows to owners are charged twice": Mutant(
        "sparsejax/schemes/owners/rows.py",
        "push = base.stage(pushed, (n - 1)",
        "push = base.stage(2 * pushed, (n - 1)",
        "tests/laws/test_wire_contract.py",
    ),
    "a forecast of rows forgets their slots": Mutant(
        "sparsejax/schemes/row_lists.py",
        "row_bytes = 4 + -(-load.unit_bytes(wire_dtype) // 4) * 4",
        "row_bytes = -(-load.unit_bytes(wire_dtype) // 4) * 4",
        "tests/laws/test_exact_rows.py tests/laws/test_explain.py",
    ),
    "rows are explained as arrays": Mutant(
        "sparsejax/advise/explain/rows.py",
        "told = scheme.forecast_rows(load)",
        "told = scheme.forecast(load)",
        "tests/laws/test_explain.py",
    ),
    # Messages and names.
    "a state of other parameters is taken": Mutant(
        "sparsejax/transforms/feedback.py",
        "            check_like(held, paths, leaves, structure)\n",
        "            pass\n",
        "tests/laws/test_bad_input.py",
    ),
    "a state passed with P() is said to be of more ranks": Mutant(
        "sparsejax/transforms/state/per_rank.py",
        "if inside and _is_whole(",
        "if not inside and _is_whole(",
        "tests/laws/test_bad_input.py",
    ),
    "an optimizer and parameters may be swapped": Mutant(
        "sparsejax/transforms/state/observing.py",
        "    tree.check_transformation(tx, params)\n",
        "",
        "tests/laws/test_bad_input.py",
    ),
    "a profile may hold what was traced": Mutant(
        "sparsejax/advise/profile.py",
        "if any(isinstance(x, Tracer)",
        "if any(x is None",
        "tests/advise/test_planner.py",
    ),
    "a star brings names that mislead": Mutant(
        "sparsejax/__init__.py",
        '    "abstract_state",\n',
        '    "abstract_state",\n    "local",\n',
        "tests/laws/test_names.py",
    ),
    "a docstring shows what does not run": Mutant(
        "sparsejax/transforms/state/placed.py",
        "nnx.Optimizer(model, sparsejax.bind(tx, mesh), wrt=nnx.Param)",
        "nnx.Optimizer(model, sparsejax.bind(mesh, tx), wrt=nnx.Param)",
        "tests/test_readme.py",
    ),
    "what waits behind blocks is not flushed": Mutant(
        "sparsejax/embrace/horizontal/schedule.py",
        "if of_rest is not None and (given := cut.rest()) is not None:",
        "if of_rest is None and (given := cut.rest()) is not None:",
        "tests/embrace/horizontal/test_training.py",
    ),
    # Jobs that cannot train.
    "processes that differ pass": Mutant(
        "sparsejax/wire/job/agreement.py",
        "    if len(groups) == 1:\n        return []\n",
        "    if groups:\n        return []\n",
        DOCTOR,
    ),
    "a gradient that was summed passes": Mutant(
        "sparsejax/advise/doctor/ranks.py",
        "if names - tree.axes_of(leaf)",
        "if names < tree.axes_of(leaf)",
        DOCTOR,
    ),
    "devices hold other bytes and pass": Mutant(
        "sparsejax/advise/doctor/ranks.py",
        "if len(set(its)) > 1]",
        "if len(set(its)) > 2]",
        DOCTOR,
    ),
    "processes at other places of a script are taken for alike": Mutant(
        "sparsejax/wire/job/store.py",
        "if what != asked[first]:",
        "if not what:",
        DOCTOR,
    ),
    "a process comes twice": Mutant(
        "sparsejax/advise/doctor/roll.py",
        "    if twice:",
        "    if False:",
        DOCTOR,
    ),
    "a process that was stopped is there": Mutant(
        "sparsejax/advise/doctor/roll.py",
        "if not _has_ended(one[0])]",
        "if one]",
        DOCTOR,
    ),
    "a connection to itself is one to process 0": Mutant(
        "sparsejax/advise/doctor/coordinator.py",
        "if line.getsockname() == line.getpeername():",
        "if line is None:",
        DOCTOR,
    ),
    "process 0 ends the job before others know why": Mutant(
        "sparsejax/wire/job/store.py",
        'if other != "0":',
        'if other == "0":',
        DOCTOR,
    ),
    "a coordinator is its own host for each": Mutant(
        "sparsejax/advise/doctor/coordinator.py",
        "if facts.is_loopback(found) and not one_host and for_all:",
        "if facts.is_loopback(found) and not one_host and not for_all:",
        DOCTOR,
    ),
    "a rate is of bytes that were not sent": Mutant(
        "sparsejax/advise/doctor/links.py",
        "waits * short.median, 0.5 * whole.median",
        "-waits * short.median, 0.5 * whole.median",
        DOCTOR,
    ),
    "the doctor times fewer rounds": Mutant(
        "sparsejax/advise/doctor/links.py",
        "ROUNDS = 7",
        "ROUNDS = 5",
        DOCTOR,
    ),
    "sources that differ have one hash": Mutant(
        "sparsejax/wire/job/versions.py",
        "            digest.update(path.read_bytes())\n",
        "",
        DOCTOR,
    ),
    "process 0 listens at any port": Mutant(
        "sparsejax/wire/job/watch.py",
        "server = listening(self._port)",
        "server = listening(0)",
        "tests/wire/job/test_watch.py",
    ),
    # Ranks and processes that would diverge.
    "elements that changed places have the same checksum": Mutant(
        "sparsejax/transforms/state/alike/checksums.py",
        "_PLACES = np.uint32(0x9E3779B1), np.uint32(0x85EBCA77)",
        "_PLACES = np.uint32(0), np.uint32(0)",
        REPLICAS,
    ),
    "changes that cancel out have the same checksum": Mutant(
        "sparsejax/transforms/state/alike/checksums.py",
        "    first, a, second, b, third = numbers\n",
        "    return x\n    first, a, second, b, third = numbers\n",
        REPLICAS,
    ),
    "signs of zeros do not count": Mutant(
        "sparsejax/transforms/state/alike/checksums.py",
        "    size = _bits(x.dtype)\n",
        "    x = jnp.where(x == 0, 0, x)\n    size = _bits(x.dtype)\n",
        REPLICAS,
    ),
    "an array is as the one before": Mutant(
        "sparsejax/transforms/state/alike/checksums.py",
        "    return sums[np.argsort(order)]\n",
        "    return sums\n",
        REPLICAS,
    ),
    "the rank that is alone is taken for the others": Mutant(
        "sparsejax/transforms/state/alike/replicas.py",
        "key=lambda group: (-len(group), group)",
        "key=lambda group: (len(group), group)",
        REPLICAS,
    ),
    "what a rank holds for itself is compared": Mutant(
        "sparsejax/transforms/state/alike/replicas.py",
        '            keys, node = (*keys, jax.tree_util.GetAttrKey("ranks")), node.ranks\n',
        "            node = node.value\n",
        REPLICAS,
    ),
    "shards are compared with others": Mutant(
        "sparsejax/transforms/state/alike/replicas.py",
        "if n not in split and",
        "if n and",
        REPLICAS,
    ),
    "a check comes a step late": Mutant(
        "sparsejax/training/train_state.py",
        "elif number % self._every:",
        "elif (number + 1) % self._every:",
        CHECK_EVERY,
    ),
    "a state from elsewhere is not compared": Mutant(
        "sparsejax/training/train_state.py",
        "            self._step = state.step\n        elif",
        "            self._step = state.step\n            return\n        elif",
        CHECK_EVERY,
    ),
    "steps are read from the device": Mutant(
        "sparsejax/training/train_state.py",
        "        self._number = None if self._number is None else self._number + 1\n",
        "        self._number = None\n",
        CHECK_EVERY,
    ),
    "processes that set out with other things go on": Mutant(
        "sparsejax/wire/job/agreement.py",
        "    if not differing:\n",
        "    if differing:\n",
        SETUP,
    ),
    "who refuses leaves the others waiting": Mutant(
        "sparsejax/transforms/state/alike/setup.py",
        '                self._disagreements(f"{type(error).__name__}: {error}")\n',
        "                pass\n",
        SETUP,
    ),
    "a learning rate is no difference": Mutant(
        "sparsejax/transforms/state/alike/program.py",
        "given = [_number(x.val) for x in equation.invars if isinstance(x, core.Literal)]",
        "given = []",
        SETUP,
    ),
    "some processes wait for all": Mutant(
        "sparsejax/wire/job/store.py",
        'some = {} if len(asking) == here.processes else {"process_ids": list(asking)}',
        "some = {}",
        "tests/wire/job/test_store.py",
    ),
    "some processes and all take one number": Mutant(
        "sparsejax/wire/job/store.py",
        '    return f"sparsejax/of {some}/{number}"\n',
        '    return f"sparsejax/{number}"\n',
        "tests/wire/job/test_store.py",
    ),
    "what happened first is the cause": Mutant(
        "sparsejax/wire/job/watchers.py",
        "text = min(self._events).text",
        "text = self._events[0].text",
        "tests/wire/job/test_watch.py",
    ),
    "the first that leaves lets all go on": Mutant(
        "sparsejax/wire/job/watchers.py",
        "if len(self._left) == len(self._hosts) and not self._events:",
        "if not self._events:",
        "tests/wire/job/test_watch.py",
    ),
    "one that leaves early keeps the others waiting": Mutant(
        "sparsejax/wire/job/watchers.py",
        "        elif is_first:\n",
        "        elif False:\n",
        "tests/wire/job/test_watch.py",
    ),
    "one that waits for the others is not watched": Mutant(
        "sparsejax/wire/job/watchers.py",
        'return "happened" not in said',
        'return not {"left", "happened"} & set(said)',
        "tests/wire/job/test_watch.py",
    ),
    "a script that exits has left its block": Mutant(
        "sparsejax/wire/job/watch.py",
        "            if error is None:\n",
        "            if error is None or isinstance(error, SystemExit):\n",
        "tests/wire/job/test_watch.py",
    ),
    "a script that ends in its block is not seen": Mutant(
        "sparsejax/wire/job/watch.py",
        '        atexit.register(self._fail, "ended its script inside its block")\n',
        "",
        "tests/wire/job/test_watch.py",
    ),
    "process 0 closes before the others have read": Mutant(
        "sparsejax/wire/job/side.py",
        "            self.watcher.wait_for_ends(self._timeout)\n",
        "",
        "tests/wire/job/test_side.py",
    ),
    "a silent process is not lost": Mutant(
        "sparsejax/wire/job/watchers.py",
        "for said in line.heard(self._timeout):",
        "for said in line.heard(1e6):",
        "tests/wire/job/test_watch.py",
    ),
    "process 0 keeps to itself why": Mutant(
        "sparsejax/wire/job/watchers.py",
        "            line.say(why=why)\n",
        "            pass\n",
        "tests/wire/job/test_watch.py",
    ),
    # Files.
    "a checkpoint's name may be as long as the system allows": Mutant(
        "sparsejax/transforms/state/checkpoints/folders.py",
        "_LONGEST = 255 - len(NEXT + writing.UNFINISHED)",
        "_LONGEST = 255",
        "tests/laws/test_paths.py",
    ),
    "a plan of any size is read": Mutant(
        "sparsejax/advise/codec.py",
        "if len(text) > LARGEST:",
        "if False:",
        "tests/advise/test_planner.py",
    ),
    "a description of any size is read": Mutant(
        "sparsejax/transforms/state/checkpoints/records.py",
        "if len(text) > LARGEST:",
        "if False:",
        "tests/transforms/state/checkpoints/test_refused.py",
    ),
    "a checkpoint is of anything": Mutant(
        "sparsejax/transforms/state/checkpoints/restoring.py",
        "found = first_difference(record.tree, fresh, others)",
        "found = None",
        "tests/transforms/state/checkpoints/test_refused.py",
    ),
    "shapes in a checkpoint may be any": Mutant(
        "sparsejax/transforms/state/checkpoints/comparing.py",
        "if saved.dtype == fresh.dtype and alike(saved.shape, fresh.shape):",
        "if saved.dtype == fresh.dtype:",
        "tests/transforms/state/checkpoints/test_refused.py",
    ),
    "what schemes' states are is not compared": Mutant(
        "sparsejax/transforms/state/checkpoints/comparing.py",
        "found = _differ_in_schemes(saved, fresh, path)",
        "found = None",
        "tests/transforms/state/checkpoints/test_refused.py",
    ),
    "a checkpoint is of the ranks that there are": Mutant(
        "sparsejax/transforms/state/checkpoints/restoring.py",
        "others = record.ranks.are_others(here)",
        "others = False",
        "tests/transforms/state/checkpoints/test_round_trip.py",
    ),
    "a checkpoint is read whole": Mutant(
        "sparsejax/transforms/state/checkpoints/restoring.py",
        "return jax.random.key_data(like).sharding if is_key(like) else like.sharding",
        "return None",
        "tests/transforms/state/checkpoints/test_round_trip.py",
    ),
    "what was sent before is forgotten on other ranks": Mutant(
        "sparsejax/transforms/state/checkpoints/restoring.py",
        "return self.like._replace(totals=node)",
        "return self.like",
        "tests/transforms/state/checkpoints/test_round_trip.py",
    ),
    "rows that wait have the room of a fresh state": Mutant(
        "sparsejax/transforms/state/checkpoints/comparing.py",
        "Pending: _pending}",
        "Pending: _equal}",
        "tests/transforms/state/checkpoints/test_round_trip.py",
    ),
    "the last checkpoint goes before the new one is there": Mutant(
        "sparsejax/transforms/state/checkpoints/storage.py",
        "        folder.rename(last)",
        "        folders.removed(folder)",
        "tests/transforms/state/checkpoints/test_saving.py",
    ),
    "what was not finished stays": Mutant(
        "sparsejax/transforms/state/checkpoints/storage.py",
        "        folders.removed(old)",
        "        pass",
        "tests/transforms/state/checkpoints/test_saving.py",
    ),
    "what was written is not read back": Mutant(
        "sparsejax/transforms/state/checkpoints/storage.py",
        "        _check(to, about, part, arrays)",
        "        pass",
        "tests/transforms/state/checkpoints/test_written.py",
    ),
    "other numbers than those that were given are good enough": Mutant(
        "sparsejax/transforms/state/checkpoints/reading.py",
        "            if not all(same):",
        "            if False:",
        "tests/transforms/state/checkpoints/test_written.py",
    ),
    "another description than that which was given is good enough": Mutant(
        "sparsejax/transforms/state/checkpoints/storage.py",
        "    if is_first and not checksums.is_same(json.loads(text), about):",
        "    if False:",
        "tests/transforms/state/checkpoints/test_written.py",
    ),
    "rows that several devices have are not all compared": Mutant(
        "sparsejax/transforms/state/checkpoints/reading.py",
        "for i in (shard.replica_id, shard.replica_id + 1))",
        "for i in (0, 1))",
        "tests/transforms/state/checkpoints/test_written.py",
    ),
    "chunks that were never written are zeros": Mutant(
        "sparsejax/transforms/state/checkpoints/reading.py",
        '"fill_missing_data_reads": False',
        '"fill_missing_data_reads": True',
        "tests/transforms/state/checkpoints/test_damaged.py",
    ),
    "a host waits for nothing that another wrote": Mutant(
        "sparsejax/transforms/state/checkpoints/storage.py",
        "(_SEEN if jax.process_count() > 1 else 0)",
        "0",
        "tests/transforms/state/checkpoints/test_written.py",
    ),
    "a name that was not given is not given back": Mutant(
        "sparsejax/transforms/state/checkpoints/storage.py",
        "            last.rename(folder)",
        "            pass",
        "tests/transforms/state/checkpoints/test_written.py",
    ),
    "a folder that came in the meantime is replaced": Mutant(
        "sparsejax/transforms/state/checkpoints/storage.py",
        "    last = beside(folder, LAST)\n    if is_there:",
        "    last = beside(folder, LAST)\n    if folder.exists():",
        "tests/transforms/state/checkpoints/test_written.py",
    ),
    "after a crash what had the name before is forgotten": Mutant(
        "sparsejax/transforms/state/checkpoints/folders.py",
        "    return new if new.exists() else old",
        "    return new",
        "tests/transforms/state/checkpoints/test_written.py",
    ),
    "a link that was replaced stays": Mutant(
        "sparsejax/transforms/state/checkpoints/folders.py",
        "        folder.unlink()",
        "        pass",
        "tests/transforms/state/checkpoints/test_written.py",
    ),
    "a dtype that cannot be written is found by orbax": Mutant(
        "sparsejax/transforms/state/checkpoints/reading.py",
        "        if found != x.dtype:",
        "        if False:",
        "tests/transforms/state/checkpoints/test_written.py",
    ),
    "brackets of a folder's name are a pattern": Mutant(
        "sparsejax/transforms/state/checkpoints/writing.py",
        "checkpointer.save(_literal(folder), ",
        "checkpointer.save(folder, ",
        "tests/laws/test_paths.py",
    ),
    "a name that save uses is given": Mutant(
        "sparsejax/transforms/state/checkpoints/folders.py",
        "        if reserved in name:",
        "        if False:",
        "tests/laws/test_paths.py",
    ),
    "a folder above is another where there is a link": Mutant(
        "sparsejax/transforms/state/checkpoints/folders.py",
        '        if ".." in folder.parts:',
        "        if False:",
        "tests/laws/test_paths.py",
    ),
    "what is no path is looked for": Mutant(
        "sparsejax/errors.py",
        '    if not text or "\\0" in text or not is_utf8:',
        "    if not text:",
        "tests/laws/test_paths.py",
    ),
    "an older format is read": Mutant(
        "sparsejax/transforms/state/checkpoints/records.py",
        "if number != FORMAT:",
        "if number > FORMAT:",
        "tests/transforms/state/checkpoints/test_refused.py",
    ),
    "numbers on disk have no checksums": Mutant(
        "sparsejax/transforms/state/checkpoints/checksums.py",
        '            codec["configuration"] = dict(_ZSTD)',
        "            pass",
        "tests/transforms/state/checkpoints/test_damaged.py",
    ),
    "a description may have changed": Mutant(
        "sparsejax/transforms/state/checkpoints/records.py",
        "if not is_sealed:",
        "if False:",
        "tests/transforms/state/checkpoints/test_damaged.py",
    ),
    "a plan of any number of axes is read": Mutant(
        "sparsejax/advise/plan.py",
        "numbers = self.shape if len(self.shape) <= _MOST_AXES else (math.inf,)",
        "numbers = self.shape",
        "tests/advise/test_planner.py",
    ),
    "JAX_PROCESS_ID may name another": Mutant(
        "sparsejax/advise/doctor/roll.py",
        "if named and named != str(who.process):",
        "if False:",
        DOCTOR,
    ),
}


def run(mutant: Mutant, *how: str) -> tuple[bool, str]:
    """Whether the tests notice a mutant, and the first that did.

    Args:
        mutant: It.
        *how: Options of pytest; those that are not slow on two processes if none are given.
    """
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        skip = shutil.ignore_patterns(".*", "__pycache__", "results")
        shutil.copytree(ROOT, tree, ignore=skip)
        path = tree / mutant.file
        path.write_text(path.read_text().replace(mutant.old, mutant.new))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        command += [*(how or ("-m", "not slow", "-n", "2")), *mutant.tests.split()]
        environment = os.environ | {"PYTHONPATH": str(tree)}
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, check=False
        )
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    # A worker that stops at its first failure counts as an interrupt. Where nothing failed
    # and not all passed, nothing was collected, or pytest broke.
    if done.returncode and not failed:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    return failed is not None, failed[1] if failed else ""


def main(names: list[str]) -> int:
    """Runs the mutants named, or all; how many were missed."""
    missed = 0
    for name in names or MUTANTS:
        start = time.perf_counter()
        caught, test = run(MUTANTS[name])
        missed += not caught
        seconds = time.perf_counter() - start
        what = f"caught  {test}" if caught else "MISSED"
        print(f"{name:50} {seconds:4.0f} s  {what}", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
