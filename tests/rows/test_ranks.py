"""Inside `shard_map` each rank has the rows that it has read; their sum is the gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax.axes import varying_axes
from sparsejax.rows import value_and_grad
from sparsejax.units.merging import merge
from sparsejax.units.row_grads import RowGrads, is_row_grads
from tests import helpers
from tests.rows import cases
from tests.rows.cases import CASES, HEIGHT, IDS, take


RANKS = 4
BATCH = (np.arange(RANKS)[:, None, None] * 6 + IDS * 7 + 1) % HEIGHT

NAMES = ["scaled_by_a_parameter", "scan_of_remat", "tied", "twice"]
MORE_NAMES = ["fill_behind_a_scale", "scan_in_scan", "several_rows_each_or_none"]
# A parameter that is read in one branch and is replicated is summed over the ranks inside
# of it by `jax.grad`, and ranks that take another one wait for it for ever.
WITH_BRANCHES = ["cond_of_operands", "scan_of_switch"]


def total(grads, summed):
    """The sum over the ranks of what each has."""

    def of_leaf(leaf):
        if not is_row_grads(leaf):
            return leaf if summed else jax.lax.psum(leaf, "data")
        leaf = merge(leaf)
        gather = functools.partial(jax.lax.all_gather, axis_name="data", tiled=True)
        whole = RowGrads(gather(leaf.ids), gather(leaf.rows), leaf.shape).to_dense()
        return jax.lax.pmax(whole, "data")

    return jax.tree.map(of_leaf, grads, is_leaf=is_row_grads)


@functools.cache
def wanted(name):
    """The value and the gradient of the sum of all ranks' losses."""

    def loss(p):
        one = lambda ids: CASES[name].loss(take, p, ids)
        return sum(map(one, BATCH))

    return jax.jit(jax.value_and_grad(loss))(cases.params())


@pytest.mark.parametrize(
    ("check_vma", "local", "names"),
    [
        (True, True, [*NAMES, *WITH_BRANCHES]),
        *helpers.slow(
            (False, False, [*NAMES[:2], *WITH_BRANCHES]),
            (True, False, MORE_NAMES),
        ),
    ],
)
def test_the_sum_over_the_ranks_is_the_gradient(check_vma, local, names):
    def step(p, batch):
        p = sparsejax.local(p) if local else p
        sums = {}
        for name in names:
            loss = lambda p, name=name: CASES[name].loss(take, p, batch[0])
            value, grads = value_and_grad(loss)(p)
            assert is_row_grads(grads["table"]) == (CASES[name].rows is not None)
            if check_vma and is_row_grads(grads["table"]):
                assert varying_axes(grads["table"].ids) == {"data"}
                assert varying_axes(grads["table"].rows) == {"data"}
            summed = check_vma and not local
            sums[name] = jax.lax.psum(value, "data"), total(grads, summed)
        return sums

    p = cases.params()
    ranks = helpers.shard_map(
        step,
        mesh=helpers.mesh_of(RANKS),
        in_specs=(P(), P("data")),
        out_specs=P(),
        check_vma=check_vma,
    )
    got = jax.jit(ranks)(p, BATCH)
    want = {name: wanted(name) for name in names}
    for (path, x), y in zip(
        jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4, err_msg=str(path))


def test_what_all_ranks_have_read_alike_counts_once():
    """Where types say so: the gradient of such a lookup is a sum over the ranks."""

    def loss(p, ids):
        return cases.score(take, p, ids) + (take(p["table"], jnp.array([3, 4])) ** 2).sum()

    def step(p, batch):
        grads = value_and_grad(lambda p: loss(p, batch[0]))(p)[1]
        assert grads["table"].capacity == IDS.size + 2
        return total(grads, summed=True), grads["table"].ids

    def mean_loss(p):
        # What `loss` is under the types of shard_map: its second part is one for all ranks.
        return sum(cases.score(take, p, ids) for ids in BATCH) + RANKS * (
            (take(p["table"], jnp.array([3, 4])) ** 2).sum()
        )

    p = cases.params()
    ranks = helpers.shard_map(
        step,
        mesh=helpers.mesh_of(RANKS),
        in_specs=(P(), P("data")),
        out_specs=(P(), P("data")),
    )
    got, ids = jax.jit(ranks)(p, BATCH)
    np.testing.assert_allclose(
        got["table"], jax.grad(mean_loss)(p)["table"], rtol=1e-4, atol=1e-5
    )
    assert (np.asarray(ids) == 3).sum() - (BATCH == 3).sum() == 1
