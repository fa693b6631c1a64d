"""Every ownership is a bijection, and the hashes are balanced on any set."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import hashing
from sparsejax.units.ownership import Contiguous, MurmurHash, StripedHash
from tests import helpers


RULES = {"striped": StripedHash(seed=7), "murmur": MurmurHash(), "contiguous": Contiguous()}
# 1003 units, which none of these ranks but one divide; and fewer units than ranks.
SIZES_AND_RANKS = [(1003, 8), (2, 16)]
MORE_OF_THEM = [(1003, 1), (1003, 7)]


def everything(name, size, n):
    """All that a layout computes over `size` units and n ranks, in NumPy."""
    layout = RULES[name].over(size, n)
    rng = np.random.default_rng(size)
    flags = [rng.random(size) < density for density in (0.0, 0.2, 1.0)]
    numbers = rng.standard_normal(size).astype(np.float32)
    rows = rng.standard_normal((size, 3)).astype(np.float32)

    @jax.jit
    def run(flags, numbers, rows):
        units = jnp.arange(size, dtype=jnp.int32)
        parts, slots = layout.assign(units)
        every_part = jax.lax.broadcasted_iota(jnp.int32, (n, layout.width), 0)
        every_slot = jax.lax.broadcasted_iota(jnp.int32, (n, layout.width), 1)

        def scatter(x):
            # Slots of no unit hold something else than zero.
            dense = jnp.full((n, layout.width, *x.shape[1:]), 77, x.dtype)
            return dense.at[parts, slots].set(x)

        return {
            "parts": parts,
            "slots": slots,
            "units": layout.invert(parts, slots),
            "unit_of": layout.invert(every_part, every_slot),
            "split": [layout.split(some) for some in flags],
            "joined": [layout.join(scatter(numbers)), layout.join(scatter(rows))],
        }

    results = jax.tree.map(np.asarray, run(flags, numbers, rows))
    return layout, flags, [numbers, rows], results


@pytest.mark.parametrize(
    ("name", "size", "n"),
    [
        *((name, *shape) for name in RULES for shape in SIZES_AND_RANKS),
        *helpers.slow(*((name, *shape) for name in RULES for shape in MORE_OF_THEM)),
    ],
)
def test_every_unit_has_a_place_of_its_own_and_other_places_have_none(name, size, n):
    layout, flags, values, got = everything(name, size, n)
    parts, slots = got["parts"], got["slots"]
    np.testing.assert_array_equal(got["units"], np.arange(size))
    assert parts.dtype == slots.dtype == np.int32
    assert ((parts >= 0) & (parts < n)).all()
    assert ((slots >= 0) & (slots < layout.width)).all()
    expected = np.full((n, layout.width), -1)
    expected[parts, slots] = np.arange(size)
    assert (expected >= 0).sum() == size
    taken = got["unit_of"] < size
    assert (got["unit_of"] >= 0).all()
    np.testing.assert_array_equal(np.where(taken, got["unit_of"], -1), expected)
    # Flags are split into these places, and numbers and rows joined from them.
    for some, split in zip(flags, got["split"], strict=True):
        there = np.zeros((n, layout.width), bool)
        there[parts[some], slots[some]] = True
        np.testing.assert_array_equal(helpers.unpacked(split), there)
    for wanted, joined in zip(values, got["joined"], strict=True):
        np.testing.assert_array_equal(joined, wanted)


@pytest.mark.parametrize("name", ["striped", "contiguous"])
@pytest.mark.parametrize(
    ("size", "n", "width"), [(2, 16, 32), (1003, 1, 1024), (1024, 8, 128), (1025, 8, 160)]
)
def test_parts_are_no_wider_than_whole_words_make_them(name, size, n, width):
    assert RULES[name].over(size, n).width == width


def test_tables_may_be_kept_and_given_back():
    rule = MurmurHash(seed=5)
    tables = rule.tables(1003, 3)
    assert tables.dtype == jnp.int32
    kept = np.asarray(tables)
    assert kept.shape == (3, rule.over(1003, 3).width)
    # The units of each part, ascending, then 1003 to the end.
    assert sorted(kept[kept < 1003]) == list(range(1003))
    assert (np.diff(kept, axis=1) >= 0).all()
    layout = rule.over(1003, 3, tables)
    units = jnp.arange(1003)
    parts, slots = layout.assign(units)
    np.testing.assert_array_equal(layout.invert(parts, slots), units)


def test_another_seed_is_another_ownership():
    units = jnp.arange(1003)
    for rule in (StripedHash, MurmurHash):
        first, _ = rule(seed=0).over(1003, 8).assign(units)
        other, _ = rule(seed=1).over(1003, 8).assign(units)
        # By chance one unit in eight has the same part.
        assert 0.05 < np.mean(np.asarray(first == other)) < 0.25


def test_mix32_is_murmurhash3():
    keys = np.frombuffer(b"test\0\0\0\0\xff\xff\xff\xff", "<u4")
    # The published vectors for these four bytes with these seeds.
    with np.errstate(over="ignore"):
        assert hashing.mix32(keys, 0).tolist() == [0xBA6BD213, 0x2362F9DE, 0x76293B50]
        assert hashing.mix32(keys, 0x9747B28C)[0] == 0x704B81DC
    np.testing.assert_array_equal(
        hashing.mix32(jnp.asarray(keys), 0), [0xBA6BD213, 0x2362F9DE, 0x76293B50]
    )


# --- Balance: Zen, Theorem 2.

HASHES = {"striped": StripedHash, "murmur": MurmurHash}
SIZE = 3_000_017
MANY = 1 << 17


def counts_of(n):
    """How many units a set has: few, but 16 a rank at least, and many."""
    return (1 << 10 if n <= 64 else 1 << 14), MANY


@functools.cache
def sets_of(count, n):
    """The names of the adversarial sets, and the sets, a row each."""
    named = helpers.adversarial_sets(SIZE, count, n)
    return list(named), np.stack(list(named.values())).astype(np.int32)


def imbalance(rule, units, n):
    """Units of the fullest part over those of the mean part (Zen, definition 8)."""
    # Parts need no tables, and those of a large layout take long.
    none = np.broadcast_to(np.int32(0), (n, rule.width(SIZE, n)))
    layout = rule.over(SIZE, n, none)
    parts = jax.jit(lambda x: layout.assign(x)[0])(units.reshape(-1))
    parts = np.asarray(parts).reshape(units.shape)
    return np.array([np.bincount(row, minlength=n).max() * n / len(row) for row in parts])


def spread(count, n):
    """What Theorem 2 measures the excess over 1 in."""
    return np.sqrt(n * np.log(n) / count)


@pytest.mark.parametrize("hash_name", HASHES)
@pytest.mark.parametrize("n", [3, *helpers.slow(8, 1000, 1024)])
def test_every_set_is_spread_evenly(hash_name, n):
    for count in counts_of(n):
        names, units = sets_of(count, n)
        assert count >= 16 * n
        for seed in (0, 1):
            found = imbalance(HASHES[hash_name](seed=seed), units, n)
            for name, ratio in zip(names, found, strict=True):
                bound = 1 + 3 * spread(count, n)
                where = f"{name}, {count} units, seed {seed}"
                assert 1 <= ratio <= bound, f"{where}: {ratio:.3f} > {bound:.3f}"


def test_ranges_without_a_hash_are_not_balanced():
    units = sets_of(MANY, 16)[1][:1]
    ratio = imbalance(Contiguous(), units, 16)[0]
    # The range lies in one or two of the 16 parts.
    assert ratio > 8
    assert ratio > 1 + 3 * spread(MANY, 16)


def test_unit_modulo_ranks_would_not_be_balanced():
    # The sets are adversarial: what first comes to mind puts all of one in one part.
    names, units = sets_of(MANY, 16)
    parts = units[names.index("every n-th")] % 16
    assert np.bincount(parts, minlength=16).max() == len(parts)
