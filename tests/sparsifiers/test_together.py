"""Several arrays are selected from by one program, as each by itself would be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import sparsifiers
from sparsejax.sparsifiers import base
from sparsejax.units.selection import selections


DENSITY = 0.03
SIZES = (40_001, 3001, 3001)  # one that is searched by way of a sample
SPARSIFIERS = {
    "dgc": sparsifiers.DGC(DENSITY),
    "reuse_threshold": sparsifiers.ReuseThreshold(DENSITY, every=2),
    "dragonn": sparsifiers.Dragonn(DENSITY, slots=2.0, tables=2),
}


def cases():
    """Arrays of which none, one or several are cut, or have their thresholds corrected."""
    rng = np.random.default_rng(0)
    usual = [rng.standard_t(3, size).astype(np.float32) for size in SIZES]
    yield usual
    yield [usual[0], np.full_like(usual[1], 0.5), 0 * usual[2]]
    yield [np.ones_like(x) for x in usual]
    last = np.where(np.arange(SIZES[2]) % 50 == 3, np.nan, usual[2]).astype(np.float32)
    yield [usual[0] ** 3, np.sign(usual[1]), last]
    yield [usual[0], usual[1] / 9, 9 * usual[2]]


def draw(sparsifier, size, number, step):
    return base.Draw(step, 77 + number.astype(jnp.uint32), sparsifier.wanted(size, step))


def programs(sparsifier):
    @jax.jit
    def together(arrays, step):
        return sparsifier.select_all(
            arrays,
            [sparsifier.init(x.size, x.dtype) for x in arrays],
            [draw(sparsifier, x.size, jnp.int32(i), step) for i, x in enumerate(arrays)],
            [sparsifier.capacity(x.size) for x in arrays],
        )

    @jax.jit
    def alone(x, number, step):
        state = sparsifier.init(x.size, x.dtype)
        drawn = draw(sparsifier, x.size, number, step)
        return sparsifier.select(x, state, drawn, sparsifier.capacity(x.size))

    return together, alone


@pytest.mark.slow
@pytest.mark.parametrize("name", SPARSIFIERS)
def test_each_array_gets_what_it_would_get_alone(name):
    together, alone = programs(SPARSIFIERS[name])
    step = jnp.int32(2)
    for arrays in cases():
        each = [alone(x, jnp.int32(i), step) for i, x in enumerate(arrays)]
        want = tuple(map(list, zip(*each, strict=True)))
        jax.tree.map(np.testing.assert_array_equal, together(arrays, step), want)


def test_arrays_that_are_alike_share_a_program():
    shape = lambda size, dtype=jnp.float32: jax.ShapeDtypeStruct((size,), dtype)
    arrays = [shape(100), shape(3200), shape(99), shape(2000, jnp.float64), shape(50)]
    assert list(selections.groups(arrays)) == [[1, 0], [2, 4], [3]]
    # No bit has a number above 2^31.
    large = [shape(2**30 + 2**29), shape(2**30)]
    assert list(selections.groups(large)) == [[0], [1]]
    # Nor has one in the room behind the last, which is as long as the first.
    large = [shape(2**30 + 2**20), shape(2**29)]
    assert list(selections.groups(large)) == [[0], [1]]
    assert list(selections.groups([])) == []
