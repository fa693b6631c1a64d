"""The table of what was sent says what the metrics say."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax
from sparsejax import errors
from sparsejax.advise.table import table
from tests import helpers


PARAMS = {"embedding": jnp.zeros((512, 8)), "bias": jnp.zeros(40)}


def of_first_rank(state):
    """A state as `update` returned it on the first rank."""
    return jax.tree.map(lambda x: x[0], state)


def test_it_says_what_was_sent():
    tx = sparsejax.sync(
        sparsejax.schemes.AGSparse(), rules={"embedding": "sparse"}, reduce="sum"
    )
    x = np.zeros((2, 3, 512, 8), np.float32)
    x[0, :, :64] = x[1, :, 32:96] = 1
    grads = {"embedding": x, "bias": np.ones((2, 3, 40), np.float32)}
    state = of_first_rank(helpers.ranks(2)(tx, grads).state)
    metrics = sparsejax.metrics(state)
    lines = sparsejax.summary(state).splitlines()
    (row,) = (line for line in lines if line.startswith("embedding"))
    assert "12.50%" in row  # 64 of 512 rows
    assert "18.75%" in row  # 96 of them in the sum
    sent = float(metrics["sync/embedding/wire_bytes"])
    assert f"{sent / 1e3:.3g} kB" in row
    assert f"{sent / float(metrics['sync/embedding/dense_bytes']):.1%}" in row
    (last,) = (line for line in lines if line.startswith("last step"))
    (total,) = (line for line in lines if line.startswith("all of 3 exchanges"))
    assert f"{float(metrics['sync/wire_bytes']) / 1e3:.3g} kB" in last
    assert f"{float(metrics['sync/total_wire_bytes']) / 1e3:.3g} kB" in total
    assert "residuals" not in "".join(lines)


@pytest.mark.slow
def test_residuals_and_left_out_steps_are_told():
    tx = sparsejax.skip_nonfinite(
        optax.chain(sparsejax.top_k(0.1, min_size=100), sparsejax.dense_sync())
    )
    x = np.ones((2, 2, 512, 8), np.float32)
    x[1, 1, 3, 3] = np.nan
    state = helpers.ranks(2)(tx, {"embedding": x}).state
    text = sparsejax.summary(of_first_rank(state))
    norm = float(np.asarray(sparsejax.metrics(state)["sparsify/residual_norm"])[0])
    assert f"residuals of all ranks: {norm:.4g} (sparsify)" in text
    assert "left out, not finite: 1" in text
    assert "all of 1 exchange " in text


def test_nothing_was_exchanged():
    state = sparsejax.init(sparsejax.zen_sync(), PARAMS, helpers.mesh_of(2))
    assert sparsejax.summary(state) == "sync: nothing was exchanged yet."


def test_a_state_of_something_else():
    with pytest.raises(errors.StateError, match="no state of a sparsejax transformation"):
        sparsejax.summary(optax.adam(1.0).init(PARAMS))


def test_columns_are_aligned():
    rows = [["leaf", "bytes"], ["kernel", "8"], ["b", "1,024"]]
    lines = table(rows, left=(0,))
    assert lines[2:] == ["kernel      8", "b       1,024"]
