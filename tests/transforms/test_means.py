"""A mean is the sum divided once, bit for bit; owners divide before they send sums."""

import dataclasses
import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax import schemes
from sparsejax.schemes.two_level import _INSIDE
from sparsejax.state import tree
from tests import helpers
from tests.laws import test_exact_sum


RANKS = 3  # so that a division is not exact
SIZE = 1 << 12
HEIGHT = 4096


@dataclasses.dataclass(frozen=True)
class Doubled(schemes.Zen):
    """A sum of a user's own, which knows nothing of means."""

    def __call__(self, x, state, wire):
        done = super().__call__(x, state, wire)
        return schemes.Reduced(2 * done.total, None, done.state, done.traffic)

    def rows(self, tables, wire):
        done = super().rows(tables, wire)
        totals = [dataclasses.replace(x, rows=2 * x.rows) for x in done.totals]
        return done._replace(totals=totals)


def takes_mean(scheme):
    return "mean" in inspect.signature(scheme.__call__).parameters


# Of the laws' schemes those that divide sums themselves; the code of an index is no matter.
OF_LAWS = {
    name: scheme
    for name, scheme in test_exact_sum.SCHEMES.items()
    if takes_mean(scheme) and name not in (*test_exact_sum.CODES, "zen_after_a_step")
}
SCHEMES = OF_LAWS | {
    "all_sums": schemes.BalancedParallelism(pull="dense"),
    "narrow": schemes.Zen("balanced", wire_dtype="bfloat16"),
    "doubled": Doubled(),
}
by_name = pytest.mark.parametrize("name", helpers.mostly_slow(SCHEMES, "zen", "doubled"))


def sums_and_means(scheme, grads, mesh=None, axes=helpers.AXIS, **options):
    """Returns the sums and the means of gradients, stacked by rank."""
    mesh = mesh or helpers.mesh_of(len(grads))
    made = {"rules": {"": "sparse"}, **options}
    txs = [sparsejax.sync(scheme, axes, reduce=by, **made) for by in ("sum", "mean")]

    def run(x):
        like = {"w": np.zeros(x.shape[1:], x.dtype)}
        done = [tx.update({"w": x[0]}, tx.init(like))[0]["w"][None] for tx in txs]
        return tuple(done)

    step = helpers.shard_map(run, mesh=mesh, in_specs=P(axes), out_specs=P(axes))
    step = jax.jit(step)
    return [[np.asarray(x) for x in step(grad)] for grad in grads_by_density(grads)]


def grads_by_density(grads):
    """Returns gradients that are sent as entries, as all sums, and by an all-reduce."""
    units = np.arange(grads.shape[1]) % 64
    shape = (1, -1, *(1,) * (grads.ndim - 2))
    sets = [units == 0, units % 2 == 0, units >= 0]
    return [np.where(kept.reshape(shape), grads, 0).astype(grads.dtype) for kept in sets]


def check(found):
    # By XLA, which multiplies by the reciprocal of a constant.
    divide = jax.jit(lambda x: (x.astype(jnp.float32) / len(x)).astype(x.dtype))
    for sums, means in found:
        assert np.any(sums)
        assert np.asarray(divide(sums)).tobytes() == means.tobytes()
        helpers.assert_same_on_all_ranks(means)


def drawn(ranks=RANKS, shape=(SIZE,)):
    return np.random.default_rng(5).standard_normal((ranks, *shape), np.float32)


@by_name
def test_a_mean_is_the_sum_divided_once(name):
    check(sums_and_means(SCHEMES[name], drawn()))


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_LAWS)
def test_a_mean_of_four_ranks_is_the_sum_divided_once(name):
    check(sums_and_means(SCHEMES[name], drawn(4)))


def test_a_mean_of_a_table_on_gpus_is_the_sum_divided_once():
    with helpers.traced_for("cuda"):
        found = sums_and_means(schemes.Zen(), drawn(shape=(1024, 8)))
    check(found)


def test_a_mean_over_two_levels_is_the_sum_divided_once():
    mesh, axes = helpers.grid(hosts=3, devices=2), ("hosts", "devices")
    check(sums_and_means(schemes.Zen(), drawn(6), mesh, axes, two_level=True))


def few(mesh, axes, count):
    """Ids of which ranks list most several times."""
    return np.random.default_rng(3).integers(0, 90, (mesh.size, count))


def of_one_owner(mesh, axes, count):
    return helpers.of_one_owner(mesh.size, HEIGHT, count)


def of_one_device(mesh, axes, count):
    """Of one device of each host, so that they do not fit into the messages there."""
    layout = _INSIDE.over(HEIGHT, mesh.shape[axes[1]])
    own = np.asarray(layout.invert(jnp.int32(0), jnp.arange(layout.width)))
    own = own[own < HEIGHT]
    return np.stack([np.roll(own, rank)[:count] for rank in range(mesh.size)])


def means_of_rows(scheme, *kinds, mesh=None, axes=helpers.AXIS, count=40, **options):
    """Returns the sums and the means of listed rows of two tables, as for arrays."""
    mesh = mesh or helpers.mesh_of(RANKS)
    rows = drawn(mesh.size, (count, 8))
    txs = [sparsejax.sync(scheme, axes, reduce=by, **options) for by in ("sum", "mean")]
    like = {name: np.zeros((HEIGHT, 8), np.float32) for name in "ab"}

    def run(ids, rows):
        grads = {name: sparsejax.RowGrads(ids[0], rows[0], (HEIGHT, 8)) for name in like}
        found = [tx.update(grads, tx.init(like))[0] for tx in txs]
        return [
            jnp.stack([tree.to_dense(x) for x in each.values()])[None] for each in found
        ]

    step = helpers.shard_map(run, mesh=mesh, in_specs=P(axes), out_specs=P(axes))
    step, lists = jax.jit(step), [kind(mesh, axes, count) for kind in kinds or (few,)]
    return [[np.asarray(x) for x in step(ids.astype(np.int32), rows)] for ids in lists]


@pytest.mark.parametrize(
    "name", ["zen", "doubled", *helpers.slow("zen_hierarchical", "narrow")]
)
def test_a_mean_of_listed_rows_is_the_sum_divided_once(name):
    check(means_of_rows(SCHEMES[name]))


def test_a_mean_of_listed_rows_by_owners_on_gpus_is_the_sum_divided_once():
    with helpers.traced_for("cuda"):
        found = means_of_rows(schemes.Zen("balanced"), few, of_one_owner)
    check(found)


def test_a_mean_of_listed_rows_over_two_levels_is_the_sum_divided_once():
    over = {"mesh": helpers.grid(hosts=3, devices=2), "axes": ("hosts", "devices")}
    options = {"count": 400, "two_level": True}
    check(means_of_rows(schemes.Zen(), few, of_one_device, **over, **options))


def divisions(platform, scheme, update):
    """Returns the sizes of divisions inside branches or loops, and of those outside."""
    tx = sparsejax.sync(scheme, rules={"": "sparse"})
    with helpers.traced_for(platform):
        step = helpers.stacked(lambda x: update(tx, x), RANKS)
        program = jax.make_jaxpr(step)(drawn())
    found = [
        (bool(path), math.prod(eqn.outvars[0].aval.shape))
        for path, eqn in helpers.equations(program)
        if eqn.primitive.name == "div" and eqn.outvars[0].aval.dtype == jnp.float32
    ]
    return [[size for i, size in found if i == inside and size > 9] for inside in (1, 0)]


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_no_rank_divides_the_whole_result_of_owners(platform):
    def update(tx, x):
        return tx.update({"w": x}, tx.init({"w": np.zeros(SIZE, x.dtype)}))[0]["w"]

    inside, outside = divisions(platform, schemes.Zen(), update)
    # Owners divide their parts, and an all-reduce divides its result.
    assert len(inside) == 2
    assert min(inside) < 0.4 * SIZE < max(inside) == SIZE
    assert not outside
    assert divisions(platform, Doubled(), update) == [[], [SIZE]]


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_no_rank_divides_all_sums_of_listed_rows_after_they_have_arrived(platform):
    def update(tx, x):
        rows = sparsejax.RowGrads(jnp.arange(40), x[:320].reshape(40, 8), (HEIGHT, 8))
        return tx.update({"w": rows}, tx.init({"w": np.zeros((HEIGHT, 8))}))[0]["w"].rows

    inside, outside = divisions(platform, schemes.Zen("balanced"), update)
    assert inside
    assert not outside


def logged(method):
    @functools.wraps(method)
    def inner(self, x, state, wire):
        return method(self, x, state, wire)

    return inner


class Logged(schemes.Zen):
    """One whose decorator hides the argument `mean`."""

    __call__ = logged(schemes.Zen.__call__)


class Other(schemes.Zen):
    """One whose argument `mean` means something else."""

    def __call__(self, x, state, wire, mean=None):
        assert mean is None
        return super().__call__(x, state, wire)


@dataclasses.dataclass(frozen=True)
class DoubledMean(schemes.Zen):
    """One that takes a mean, and doubles it."""

    def __call__(self, x, state, wire, mean=False):
        done = super().__call__(x, state, wire, mean=mean)
        return done._replace(total=2 * done.total)


class RowsOfOwn(schemes.Zen):
    """One that sends rows by a scheme which knows nothing of means."""

    def for_rows(self, ranks, listed, height):
        return Doubled()


def test_subclasses_are_asked_for_means_only_if_they_take_them():
    made = {
        Logged(): 1,
        Other(): 1,
        DoubledMean(): 2,
        DoubledMean("hierarchical"): 2,
        RowsOfOwn(): 1,
    }
    txs = [sparsejax.sync(scheme, rules={"": "sparse"}) for scheme in made]
    like = {"w": np.zeros(SIZE, np.float32)}

    def run(x):
        return [tx.update({"w": x}, tx.init(like))[0]["w"] for tx in txs]

    x = np.zeros((RANKS, SIZE), np.float32)
    x[:, ::64] = 1
    for means, times in zip(helpers.run_ranks(run, x, RANKS), made.values(), strict=True):
        np.testing.assert_array_equal(means, times * x)


def test_a_scheme_of_rows_that_takes_no_mean_is_divided_once():
    check(means_of_rows(RowsOfOwn()))


def test_an_array_of_few_units_is_divided_once():
    check(sums_and_means(schemes.Zen("balanced"), drawn(shape=(70,))))
