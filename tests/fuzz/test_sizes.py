"""Sizes near the end of int32: what is computed when a program is traced, in Python's ints.

Nothing of that size is run: schemes are traced for arrays of 2^31 units, and refuse them in
words where int32 numbers no more. `intervals` looks in what was traced for numbers that are
known then and do not fit.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import PartitionSpec as P

import sparsejax
from benchmarks.network.scale.programs import described
from pallas_kernels import striping
from sparsejax import errors, schemes
from sparsejax.schemes import doubling, forecast
from sparsejax.schemes.base import MOST_UNITS
from sparsejax.units import merging
from sparsejax.units.ownership import murmur
from sparsejax.wire import formats, index_codes, ladder
from tests import helpers
from tests.fuzz import intervals
from tests.fuzz.programs import OF_LOSSY
from tests.laws.test_exact_sum import LOSSLESS_NEVER_WORSE as NEVER_WORSE, SCHEMES


MOST = 2**31 - 1
# Their tables are made of all units when they are traced.
TABLED = ("balanced_murmur", "balanced_algorithm_1")
# What they number others number, too.
AS_OTHERS = ("balanced_coo16", "balanced_coo32", "hierarchical_bound", "zen_hierarchical")
OTHERS = [name for name in SCHEMES if name not in (*TABLED, *AS_OTHERS)]
# Their parts may hold nearly all units.
UNEVEN = ("omni_reduce_1", "omni_reduce_20")
QUICK = ["zen", "ag_sparse_bruck", "omni_reduce"]


def traced(scheme, shape, n=2, dtype="float32", platform="cpu"):
    """The program of a scheme over an array that nobody makes."""

    def run(x):
        x = x.reshape(shape)
        return helpers.call(scheme, x, helpers.init(scheme, x)).total[:1]

    here = n <= 8 and platform == "cpu"
    mesh = helpers.mesh_of(n) if here else described(n, platform)
    step = helpers.shard_map(run, mesh=mesh, in_specs=P("data"), out_specs=P())
    whole = jax.ShapeDtypeStruct((n * shape[0], *shape[1:]), dtype)
    return jax.make_jaxpr(step)(whole)


MANY = [(1024, (MOST_UNITS,)), (1000, (2**27 + 5, 16)), (1024, (2**20 + 7, 4096))]
SIZES = [(2, (MOST_UNITS,)), (3, (2**27 + 5, 16)), *MANY]
IN_SHORT = [(name, *size) for name in QUICK for size in MANY[:1]]
# Of each variant one size, so that each size has variants of all kinds.
REST = [(x, *SIZES[at % 5]) for at, x in enumerate(OTHERS)]
REST += [(name, *SIZES[0]) for name in QUICK]
REST = [each for each in dict.fromkeys(REST) if each not in IN_SHORT]


@pytest.mark.parametrize(("name", "n", "shape"), [*IN_SHORT, *helpers.slow(*REST)])
def test_nothing_that_is_known_when_traced_exceeds_int32(name, n, shape):
    if name in UNEVEN and n >= 1000 and shape[0] > 2**27:
        # On many ranks parts that may hold everything have too many slots.
        with pytest.raises(errors.ArgumentError, match="more than int32 can number"):
            traced(SCHEMES[name], shape, n)
        return
    found = intervals.overflows(traced(SCHEMES[name], shape, n))
    assert not found, found


# One of each kind, with codes of indices of their own.
IN_PARTS = ["zen", "balanced_bitmap", "ag_sparse_bruck", "sparcml"]


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_PARTS)
def test_nor_does_it_in_programs_for_gpus(name):
    program = traced(SCHEMES[name], (MOST_UNITS,), 1024, platform="cuda")
    assert not intervals.overflows(program)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *((name, MOST_UNITS + 1) for name in QUICK),
        ("zen", MOST),
        *helpers.slow(*((name, MOST_UNITS + 1) for name in OTHERS if name not in QUICK)),
    ],
)
def test_more_units_than_int32_numbers_are_refused(name, size):
    """But by schemes that number nothing, or blocks: there int32 is enough."""
    assert MOST_UNITS == 2**31 - 2**24
    try:
        said = intervals.overflows(traced(SCHEMES[name], (size,)))
    except errors.ArgumentError as error:
        said = [str(error)]
    refused = any(f"{size:,} units is too large" in line for line in said)
    assert refused or not said, f"call base.check_units first; what else was said: {said}"
    assert refused or name not in ("zen", "ag_sparse_bruck"), "it was not refused"


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLED)
def test_nor_does_it_where_owners_have_tables(name, monkeypatch):
    """Their width alone is counted when traced, from the hashes of all units: here it is
    that of parts a hundredth fuller than the mean one."""
    width = lambda size, ranks, seed: striping.word_multiple(
        -(-size * 101 // (100 * ranks))
    )
    monkeypatch.setattr(murmur, "_murmur_width", width)
    found = intervals.overflows(traced(SCHEMES[name], (MOST_UNITS,), 1024))
    assert not found, found


def test_the_walk_finds_what_does_not_fit():
    """Products of ranks and lengths, in choices too; not what wraps on purpose."""

    def bad(x):
        part = jax.lax.broadcasted_iota(jnp.int32, (8, 4), 0)
        side = lambda x: x + jnp.sum(part * np.int32(2**29), dtype=jnp.int32)
        return jax.lax.cond(x > 0, side, lambda x: x, x)

    def good(x):
        part = jax.lax.broadcasted_iota(jnp.int32, (8, 4), 0)
        hashed = part.astype(jnp.uint32) * np.uint32(2**31 + 1)
        return x + jnp.max(part * np.int32(2**28)) + jnp.max(hashed).astype(jnp.int32)

    def summed(x):
        counts = jax.lax.population_count(x)
        return jax.lax.psum(jnp.sum(counts.astype(jnp.int32)), "data")

    def over(n):
        step = helpers.shard_map(
            summed, mesh=described(n), in_specs=P("data"), out_specs=P()
        )
        return jax.make_jaxpr(step)(jax.ShapeDtypeStruct((n * 2**20,), jnp.uint32))

    assert len(intervals.overflows(jax.make_jaxpr(bad)(1))) >= 1
    assert not intervals.overflows(over(32))
    assert len(intervals.overflows(over(64))) == 1
    assert not intervals.overflows(jax.make_jaxpr(good)(1))


widths = st.one_of(
    st.integers(1, 200),
    st.integers(1, MOST_UNITS // 32),
    st.sampled_from([MOST_UNITS // 32]),
)


@settings(max_examples=150)
@given(
    words=widths,
    numbers=st.sampled_from([1, 1, 2, 3, 16, 100, 4096, 10**6]),
    dtype=st.sampled_from(["float32", "bfloat16", "float64"]),
    parts=st.sampled_from([1, 2, 3, 8, 64, 1024]),
    codes=st.sampled_from(["auto", *index_codes.CODES]),
    capacity=st.one_of(st.none(), st.integers(1, MOST)),
)
def test_where_the_parts_of_messages_begin(words, numbers, dtype, parts, codes, capacity):
    """The tables that programs look up are Python's numbers, or the sizes are refused."""
    width, unit_bytes = 32 * words, numbers * jnp.dtype(dtype).itemsize
    steps = ladder.Message(codes, capacity=capacity).ladder(width, unit_bytes, parts)
    top = steps.rungs[-1]
    assert top.capacity <= width + 3
    for rung in steps.rungs:
        index = rung.code.words(rung.capacity, width)
        assert rung.words == 1 + index + rung.capacity * unit_bytes // 4
    shape = (numbers,) if numbers > 1 else ()
    try:
        form = formats.Form(steps, shape, jnp.dtype(dtype), parts)
    except errors.ArgumentError:
        # A message alone is too long for it.
        assert capacity is not None or numbers > 1
        assert top.words + top.capacity > MOST // 8
        return
    assert form.room <= MOST
    for rung, row in zip(steps.rungs, form.table.tolist(), strict=True):
        string, length, values, *_, end = row[:7]
        assert end == rung.words <= form.spare <= form.room
        assert length == rung.code.string_words(rung.capacity, width)
        assert values == 1 + length + rung.code.lane_words(rung.capacity)
        assert string in (1, form.spare)
        assert all(0 <= place <= form.room for place in (row[:5] + row[6:]))
        pieces = form.pieces(steps.rungs.index(rung))
        assert pieces[-1].words.stop == rung.words


@pytest.mark.parametrize("count", [1, 64, 4096])
def test_bits_of_many_lists_are_not_laid_end_to_end(count):
    """Of many lists there are more words of bits than int32 numbers: they are sorted."""
    height, each = 2**30, 2**16
    lists = jax.ShapeDtypeStruct((count, each), jnp.int32)
    capacity = min(count * each, height)
    union = functools.partial(merging.union, capacity=capacity, nowhere=height)
    assert jax.eval_shape(union, lists)[0].shape == (capacity,)


def rows_added_up(scheme, height, n, listed):
    """The program of listed rows, and what it takes."""
    tx = sparsejax.sync(SCHEMES[scheme], "data", rules={"": "row", "table": "sparse"})
    shape = (height, 1)

    def run(ids, rows):
        grads = {"table": sparsejax.RowGrads(ids, rows, shape)}
        state = tx.init({"table": jax.ShapeDtypeStruct(shape, jnp.float32)})
        return tx.update(grads, state)[0]["table"].rows[:1]

    step = jax.vmap(run, axis_name="data")
    ids = jax.ShapeDtypeStruct((n, listed), jnp.int32)
    rows = jax.ShapeDtypeStruct((n, listed, 1), jnp.float32)
    return step, (ids, rows)


@pytest.mark.parametrize("height", [MOST, 2**33, *helpers.slow(MOST_UNITS)])
@pytest.mark.parametrize("scheme", ["zen", *helpers.slow("ag_sparse", "sparse_ps")])
def test_tables_of_more_rows_than_int32_numbers_are_refused(scheme, height):
    n, listed = (8, 4096) if scheme == "zen" else (3, 5)  # Few ranks have no owners.
    step, given = rows_added_up(scheme, height, n, listed)
    if height <= MOST_UNITS or (height == MOST and scheme == "ag_sparse"):
        assert not intervals.overflows(jax.make_jaxpr(step)(*given))
        return
    with pytest.raises(errors.ArgumentError, match=r"more than int32|many: .* int32"):
        jax.eval_shape(step, *given)


@pytest.mark.parametrize("listed", [2**21, *helpers.slow(2**20)])
@pytest.mark.parametrize("scheme", ["zen", *helpers.slow("ag_sparse")])
def test_more_listed_rows_of_all_ranks_than_int32_numbers_are_refused(scheme, listed):
    step, given = rows_added_up(scheme, MOST_UNITS, 1024, listed)
    if 1024 * listed <= MOST:
        assert not intervals.overflows(jax.make_jaxpr(step)(*given))
        return
    text = f"{listed:,} rows that each of 1024 ranks lists are {1024 * listed:,} in all"
    with pytest.raises(errors.ArgumentError, match=text):
        jax.eval_shape(step, *given)


@pytest.mark.parametrize("units", [MOST, 2**31])
def test_entries_of_more_units_than_int32_numbers_are_refused(units):
    def run(indices, values):
        tensor = sparsejax.SparseTensor(indices, values, (units,))
        return sparsejax.all_reduce(tensor, "data").values[:1]

    step = jax.vmap(run, axis_name="data")
    indices = jax.ShapeDtypeStruct((3, 5), jnp.int32)
    values = jax.ShapeDtypeStruct((3, 5), jnp.float32)
    if units <= MOST:
        assert not intervals.overflows(jax.make_jaxpr(step)(indices, values))
        return
    with pytest.raises(errors.ArgumentError, match=r"are too many: .* int32"):
        jax.eval_shape(step, indices, values)


OF_ELEMENTS = [name for name in OF_LOSSY if name not in ("GTopk", "PowerSGD")]


@pytest.mark.parametrize(
    ("name", "n", "size"),
    [
        ("GTopk", 2, MOST_UNITS),
        *((name, 2, MOST) for name in ("GTopk", *OF_ELEMENTS)),
        *helpers.slow(
            *((name, 2, MOST_UNITS) for name in OF_ELEMENTS), ("GTopk", 1024, MOST_UNITS)
        ),
    ],
)
def test_schemes_that_choose_from_as_many_as_int32_numbers(name, n, size):
    scheme = OF_LOSSY[name]
    if size > MOST_UNITS:
        with pytest.raises(errors.ArgumentError, match=f"{size:,} units is too large"):
            traced(scheme, (size,), n)
        return
    found = intervals.overflows(traced(scheme, (size,), n))
    if "OkTopk" in name:
        # Counts of regions, each of which might have all bits, but not all of them.
        found = [line for line in found if line.split()[0] not in ("cumsum", "reduce_sum")]
    assert not found


def test_bytes_of_partners_that_have_more_than_int32_counts():
    """A part with everything, and so all that two, four, ... ranks hold of it."""
    plan = doubling.DoublingPlan(16, 2**29 + 5, (4,) * 4, 0.0, "coo32", 2.0)
    most = jax.jit(plan.most_bytes)
    counts = (2**20, 2**25, 2**28, 2**29)
    told = [float(most(jnp.int32(count))) for count in counts]
    assert told == [float(plan.most_bytes(count)) for count in counts]
    assert told == sorted(told)
    assert told[-1] >= 4 * 4 * 2**29


def test_a_capacity_whose_messages_int32_cannot_number_is_refused():
    scheme = schemes.BalancedParallelism(push_capacity=2**29)
    with pytest.raises(
        errors.ArgumentError, match=r"words, more than int32 .*push_capacity"
    ):
        traced(scheme, (2**29, 64))


@pytest.mark.parametrize("name", [*SCHEMES, *OF_ELEMENTS])
def test_bytes_past_int32_are_forecast(name):
    """Of the largest array, a number or a row a unit, on 1,024 ranks: by Python."""
    # Some parts of theirs have too many slots, or their widths come of all hashes.
    if name in (*TABLED, *UNEVEN):
        return
    n, scheme = 1024, OF_LOSSY[name] if name in OF_ELEMENTS else SCHEMES[name]
    widths = (1,) if name in OF_ELEMENTS else (1, 4096)
    for numbers in widths:
        units = MOST_UNITS if numbers == 1 else 2**20
        for density in (1e-4, 1.0):
            counts = forecast.independent(n, units, density)
            load = forecast.Load(n, units, numbers, "float32", counts, shape=(units,))
            told = scheme.forecast(load)
            dense = 2 * (n - 1) / n * 4 * units * numbers
            assert 0 < told.bytes < (1.1 if name in NEVER_WORSE else n) * dense
            assert told.seconds(forecast.Network(25, 20)) > 8 * told.bytes / 25e9
    assert told.bytes > 2**31 or name in OF_ELEMENTS
