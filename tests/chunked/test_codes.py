"""Places and values come back from their codes, in the bits that are promised."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.chunked import blocks, selection
from sparsejax.chunked.blocks import BlockCut
from sparsejax.chunked.indices import PlaceCode
from sparsejax.wire.value_codes import CODES
from tests import helpers
from tests.chunked import reference


TABLED = [name for name, code in CODES.items() if code.table]
# Numbers in a block, and how many are sent.
LENGTHS = [
    (64, 40),
    (100, 7),
    (4096, 64),
    *helpers.slow((1, 1), (64, 1), (4096, 4096), (1856, 29)),
]


def drawn(blocks, length, kept, rng):
    """Places of blocks: the first, the last, and random ones."""
    rows = [np.arange(kept), np.arange(length - kept, length)]
    while len(rows) < blocks:
        rows.append(np.sort(rng.choice(length, kept, replace=False)))
    return np.stack(rows[:blocks]).astype(np.int32)


@pytest.mark.parametrize(("length", "kept"), LENGTHS)
def test_places_come_back(length, kept):
    rng = np.random.default_rng(length + kept)
    places = drawn(5, length, kept, rng)
    shortest, every = PlaceCode.shortest(5, length, kept), []
    if kept == 7:
        every = [PlaceCode(5, length, kept, low) for low in (0, 3, None)]
    for code in [shortest, *every]:
        words = jax.jit(code.encode)(jnp.asarray(places))
        assert words.shape == (code.words,)
        assert words.dtype == jnp.uint32
        np.testing.assert_array_equal(jax.jit(code.decode)(words), places)
        assert shortest.block_bits <= code.block_bits


def test_64_places_of_4096_take_8_bits_each():
    code = PlaceCode.shortest(100, 4096, 64)
    assert (code.low, code.stride) == (6, 128)
    assert 32 * code.words == 8.0 * code.entries


@pytest.mark.slow
def test_words_that_nobody_sent_lead_nowhere():
    code = PlaceCode.shortest(7, 4096, 64)
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, code.words, dtype=np.uint32)
    places = np.asarray(code.decode(jnp.asarray(words)))
    assert places.min() >= 0
    assert places.max() < 4096


# Of each width; all others: `tests/sparsifiers/test_values.py`. One number alone: of a code
# with a table, and of one without.
@pytest.mark.parametrize(
    ("name", "count"),
    [
        *((name, 100) for name in ("bfloat16", "int8", "2bit", "sign")),
        *helpers.slow(("float32", 100), ("4bit", 100), ("2bit", 1), ("bfloat16", 1)),
    ],
)
def test_values_come_back_rounded(name, count):
    code = CODES[name]
    x = np.random.default_rng(count).standard_normal(count).astype(np.float32)
    codes, table = code.encode(jnp.asarray(x))
    assert table.shape == (code.table,)
    assert int(codes.max()) < 2**code.bits
    words = code.pack(codes)
    assert words.shape == (code.words(count),)
    assert words.dtype == jnp.uint32
    back = code.decode(code.unpack(words, count), table)
    wanted = reference.QUANTIZED[name](x.astype(np.float64))
    np.testing.assert_allclose(back, wanted, rtol=1e-6)


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("bad", [np.nan, *helpers.slow(-np.inf)])
def test_what_is_not_finite_shows(name, bad):
    code = CODES[name]
    x = np.linspace(-2, 2, 50, dtype=np.float32)
    x[7] = bad
    back = code.decode(*code.encode(jnp.asarray(x)))
    back = np.asarray(back, np.float64)
    assert not np.isfinite(back[7]), f"{name} makes {back[7]} of {bad}"
    if code.bits <= 8:
        assert not np.isfinite(back).any(), f"{name}: the table makes all values not finite"


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLED)
@pytest.mark.parametrize("scale", [2.0**124, 2.0**-110])
def test_means_do_not_overflow(name, scale):
    """Near the ends of float32 a code is that of the same numbers in the middle."""
    x = np.random.default_rng(0).uniform(-2, 2, 300).astype(np.float32)
    codes, table = CODES[name].encode(jnp.asarray(x))
    found, scaled = CODES[name].encode(jnp.asarray(x * np.float32(scale)))
    np.testing.assert_array_equal(found, codes)
    np.testing.assert_array_equal(np.asarray(scaled), np.asarray(table) * np.float32(scale))


@pytest.mark.parametrize("name", helpers.mostly_slow(TABLED, "int8"))
def test_a_table_is_that_of_what_counts(name):
    code = CODES[name]
    x = np.random.default_rng(0).standard_normal(60).astype(np.float32)
    counted = np.arange(60) % 3 != 0
    codes, table = code.encode(jnp.asarray(x[counted]))
    x[~counted] = 1e6
    found, own = code.encode(jnp.asarray(x), jnp.asarray(counted))
    np.testing.assert_array_equal(np.asarray(found)[counted], codes)
    np.testing.assert_allclose(own, table, rtol=1e-6)


@pytest.mark.parametrize("name", CODES)
def test_zeros_stay_zeros(name):
    code = CODES[name]
    np.testing.assert_array_equal(code.decode(*code.encode(jnp.zeros(40))), np.zeros(40))


BLOCKS = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "few": lambda rng, shape: rng.standard_normal(shape) * (rng.random(shape) < 0.01),
    "equal": lambda rng, shape: rng.choice([-1.0, 1.0], shape),
    "steps": lambda rng, shape: np.round(2 * rng.standard_normal(shape)),
    "zeros": lambda rng, shape: np.zeros(shape),
    "heavy": lambda rng, shape: rng.standard_cauchy(shape) ** 5,
    "one row": lambda rng, shape: rng.standard_normal(shape) * (np.arange(shape[1]) < 70),
}


def selector(height, kept):
    """From blocks [blocks, length] of this height to the places of what is selected.

    It is compiled once, for the options that the module `selection` has then.
    """
    largest = jax.jit(lambda x: selection.largest([x], kept))
    views = lambda x: jnp.asarray(x.reshape(len(x), 1, height, 1, -1))
    return lambda x: np.asarray(largest(views(x)))


@pytest.mark.parametrize(
    ("height", "length", "kept", "few"),
    [(8, 96, 5, 1 << 20), *helpers.slow((17, 204, 3, 0), (64, 4096, 64, 0))],
)
def test_the_largest_are_selected(height, length, kept, few, monkeypatch):
    """Of all kinds of blocks, by themselves and together; of equal ones the first."""
    monkeypatch.setattr(selection, "_FEW", few)
    rng, select = np.random.default_rng(0), selector(height, kept)
    kinds = {name: draw(rng, (6, length)) for name, draw in BLOCKS.items()}
    kinds["mixed"] = np.stack([x[0] for x in kinds.values()][:6])
    for name, x in kinds.items():
        x = x.astype(np.float32)
        order = np.argsort(-np.abs(x), axis=1, kind="stable")
        wanted = np.sort(order[:, :kept], axis=1)
        np.testing.assert_array_equal(select(x), wanted, err_msg=name)


@pytest.mark.slow
def test_gpus_select_the_same():
    x = np.round(2 * np.random.default_rng(0).standard_normal((6, 96))).astype(np.float32)
    wanted = selector(8, 5)(x)
    with helpers.for_gpus():
        np.testing.assert_array_equal(selector(8, 5)(x), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("large", [1, 5000])
def test_leaves_are_read_where_they_are_or_laid_together(large, monkeypatch):
    monkeypatch.setattr(blocks, "_LARGE", large)
    monkeypatch.setattr(selection, "_FEW", 0)
    shapes = [(64, 192), (16, 64), (64, 64), (3, 64, 128), (2, 64, 64)]
    rng = np.random.default_rng(0)
    leaves = [rng.standard_cauchy(shape).astype(np.float32) for shape in shapes]
    cuts = [BlockCut.of(shape, 64, 4096) for shape in shapes]
    for group in blocks.together(cuts):
        found = jax.jit(group.largest)([jnp.asarray(x) for x in leaves])
        for i, places in zip(group.leaves, group.of_each(found), strict=True):
            own = np.asarray(cuts[i].indices(places)).reshape(-1)
            np.testing.assert_array_equal(own, reference.selected(leaves[i], 64, 4096))


def test_leaves_are_taken_together_as_far_as_int32_goes():
    """Nothing of a group is counted beyond it, nor are groups more than need be."""
    shapes = [(1 << 15, 1 << 15), (64, 64), *[(1 << 14, 1 << 15)] * 4, (1 << 15, 1 << 15)]
    groups = blocks.together([BlockCut.of(shape, 64, 4096) for shape in shapes])
    assert sorted(i for group in groups for i in group.leaves) == list(range(7))
    sizes = [group.blocks * group.length for group in groups]
    assert max(sizes) < 2**31
    assert len(groups) == 3


def test_nan_is_selected_first(monkeypatch):
    monkeypatch.setattr(selection, "_FEW", 0)
    x = np.random.default_rng(0).standard_normal((6, 4096)).astype(np.float32)
    x[2, [5, 4000]], x[3, 77] = [np.nan, -np.inf], -np.nan
    places = selector(64, 64)(x)
    assert {5, 4000} <= {*places[2]}
    assert 77 in places[3]


@pytest.mark.parametrize(
    "shape",
    [
        (1,),
        (7,),
        (17, 12),
        (24, 16),
        (0, 5),
        *helpers.slow(((),), ((96,),), ((2, 3, 16, 40),)),
    ],
)
def test_blocks_cover_a_leaf_once(shape):
    cut = BlockCut.of(shape, 4, 64)
    size = int(np.prod(shape))
    assert cut.blocks * cut.length == size
    numbers = jnp.arange(size, dtype=jnp.int32).reshape(shape)
    split = np.asarray(cut.split(numbers))
    assert sorted(split.reshape(-1)) == list(range(size))
    if size:
        whole = jnp.broadcast_to(jnp.arange(cut.length, dtype=jnp.int32), split.shape)
        np.testing.assert_array_equal(cut.indices(whole), split)
        found, kept = reference.blocks_of(shape, 4, 64)
        np.testing.assert_array_equal(split, np.stack(found))
        assert kept == cut.kept
