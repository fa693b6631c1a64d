"""Partners must keep the same bits, also where what they keep is rounded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import schemes
from sparsejax.schemes.doubling import held, rounded_to
from tests import helpers


NARROW = [jnp.bfloat16, jnp.float16]


def numbers():
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32)
    any_bits = bits.view(np.float32)
    edges = [0.0, -0.0, 65504, 65519.99, 65520, 1e30, -1e30, np.inf, -np.inf, np.nan]
    small = rng.standard_normal(50_000) * 2.0**-20
    halves = (rng.integers(0, 4096, 5000) + 0.5) * 2.0**-24
    # Signalling NaNs would warn when NumPy converts them.
    any_bits = np.where(np.isnan(any_bits), np.float32(np.nan), any_bits)
    rest = np.array([*edges, *small, *halves], np.float32)
    return np.concatenate([any_bits, rest])


@pytest.mark.parametrize("dtype", NARROW, ids=["bf16", "f16"])
def test_it_rounds_as_a_cast_there_and_back(dtype):
    x = numbers()
    # Denormals of float32 are flushed to zero on CPUs; they are not meant here.
    x = np.where(np.abs(x) < np.finfo(np.float32).tiny, 0, x)
    with np.errstate(all="ignore"):
        want = np.asarray(x).astype(dtype).astype(np.float32)
    got = np.asarray(jax.jit(lambda x: rounded_to(x, dtype))(x))
    np.testing.assert_array_equal(got, want)


def test_the_program_rounds_by_more_than_a_cast():
    """A compiler may drop a cast there and back; this it may not."""
    scheme = schemes.HierarchicalCentralization(wire_dtype=jnp.bfloat16)
    run = helpers.stacked(lambda x: helpers.call(scheme, x).total, 4)
    text = str(jax.make_jaxpr(run)(jnp.zeros((4, 3001))))
    assert "reduce_precision" in text


@pytest.mark.slow
def test_by_the_bound_the_second_message_is_dense_where_by_count_it_is_not():
    """Equal sets of 26%: entries of 8 bytes pay, and twice as many would not."""
    n, size = 4, 32_000
    x = np.zeros((n, size), np.float32)
    x[:, :8400] = 1
    sent = {}
    for switch in ("count", "bound"):
        scheme = schemes.HierarchicalCentralization(code="coo32", switch=switch)
        run = lambda x, scheme=scheme: helpers.call(scheme, x).traffic.push.wire
        sent[switch] = float(helpers.run_ranks(run, x, n)[0])
    first = sent["count"] / 2
    assert first < 4 * size
    assert sent["bound"] == first + 4 * size


@pytest.mark.parametrize("n", [1, 2, 3, 5, 6, 8, 13])
def test_partial_sums_are_over_as_many_ranks_as_have_one_unit_each(n):
    """With a fold, too, whose partners have twice as many as others for a while."""
    assert held(n) == [*helpers.before_messages(np.eye(n, dtype=bool))]
