"""Nothing is lost over many steps: what came is what was applied and what ranks still hold.

    sum of gradients == sum of updates + what all ranks hold

for every sparsifier behind which any scheme may stand. What a sparsifier lets through does
not depend on what becomes of it, so each runs once, over all steps in one program, and each
scheme then adds up what they sent: twenty-odd programs instead of one for each pair. All
make room for as many entries, for the same reason. The sum is one in NumPy's float64.

A new sparsifier or scheme is a row of a table here.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import sparsejax
from sparsejax import schemes, sparsifiers
from sparsejax.sparsifiers import base
from sparsejax.transforms.state.per_rank import SyncState, find
from tests import helpers


AXIS = helpers.AXIS
N, STEPS, SIZE, ROOM = 4, 32, 6007, 120
SHAPES = {"w": (SIZE,), "bias": (7,)}  # the second goes whole

SPARSIFIERS = {
    "TopK": sparsifiers.TopK,
    "RandomK": sparsifiers.RandomK,
    "Threshold": functools.partial(sparsifiers.Threshold, value=3.0),
    "DGC": sparsifiers.DGC,
    "MSTopK": sparsifiers.MSTopK,
    "GaussianK": sparsifiers.GaussianK,
    "ReuseThreshold": functools.partial(sparsifiers.ReuseThreshold, every=5),
    "Dragonn": sparsifiers.Dragonn,
    "DGC, warming up": lambda d: sparsifiers.DGC(sparsifiers.Warmup(d / 4, 20, d)),
    "Dragonn, two tables": functools.partial(sparsifiers.Dragonn, slots=1.5, tables=2),
    "Sign": lambda _: sparsifiers.Sign(),
    "QSGD": lambda _: sparsifiers.QSGD(),
}
SCHEMES = {
    "AllReduce": schemes.AllReduce(),
    "AGSparse": schemes.AGSparse(),
    "BalancedParallelism": schemes.BalancedParallelism(),
    "HierarchicalCentralization": schemes.HierarchicalCentralization(),
    "OmniReduce": schemes.OmniReduce(block=32),
    "SparCML": schemes.SparCML(),
    "SparsePS": schemes.SparsePS(),
    "Zen": schemes.Zen(),
    "Zen, bytes": schemes.Zen("bytes"),
}
# Of two levels there is a test below, and the strawman loses gradients. Schemes that choose
# themselves what they send refuse what a sparsifier has chosen.
ELSEWHERE = {"TwoLevel", "LossyStrawman"}


def with_room(make):
    """The sparsifier with the density for which it makes room for ROOM elements."""
    for k in range(1, ROOM + 1):
        made = make(k / SIZE)
        if isinstance(made, base.Rounding) or made.capacity(SIZE) == ROOM:
            return made
    raise AssertionError(f"no density of {made} makes room for {ROOM}")


def gradients(n, dtype="float32", seed=0, apart=False):
    """[n, steps, ...] with long tails; `apart`: of each element only one rank has any."""
    rng = np.random.default_rng(seed)
    grads = {k: rng.standard_t(3, (n, STEPS, *shape)) for k, shape in SHAPES.items()}
    for x in grads.values() if apart else ():
        x *= np.arange(x.shape[2]) % n == np.arange(n)[:, None, None]
    return {k: x.astype(jnp.dtype(dtype)) for k, x in grads.items()}


def zeros(dtype="float32"):
    return {name: jnp.zeros(shape, dtype) for name, shape in SHAPES.items()}


def steps(tx, state, given):
    """Updates of all steps, and the last state."""

    def step(state, now):
        update, state = tx.update(now, state)
        return state, update

    state, updates = jax.lax.scan(step, state, given)
    return updates, state


@functools.cache
def sent(name, n, dtype="float32", apart=False, check_vma=True):
    """What a sparsifier lets through, and what it then holds; both [n, ...]."""
    tx = sparsejax.sparsify(with_room(SPARSIFIERS[name]), min_size=100)

    def on_rank(grads):
        updates, state = steps(tx, tx.init(zeros(dtype)), grads)
        return updates, jax.tree.map(lambda x: x[0], sparsejax.residuals(state))

    return helpers.run_ranks(on_rank, gradients(n, dtype, apart=apart), n, check_vma)


@functools.cache
def adds_up(name, n, dtype="float32", check_vma=True):
    """From what was sent to updates, by a scheme that itself holds nothing back."""
    rules = {"w": "sparse"}
    tx = sparsejax.sync(SCHEMES[name], reduce="sum", rules=rules)

    def on_rank(given):
        updates, state = steps(tx, tx.init(zeros(dtype)), given)
        assert state.residual is None
        return updates

    return helpers.ranked(on_rank, n, check_vma)


def assert_conserved(grads, updates, held, room=1e-6):
    helpers.assert_same_on_all_ranks(updates)
    exact = lambda x: np.asarray(x).astype(np.float64)
    for name, x in grads.items():
        came, size = exact(x).sum((0, 1)), np.abs(exact(x)).sum((0, 1))
        went, waits = exact(updates[name][0]).sum(0), exact(held[name]).sum(0)
        error = np.abs(came - went - waits)
        assert (error <= room * size + 1e-30).all(), (name, (error / size).max())
        assert went.any()


def conserves(sparsifier, scheme, n, dtype="float32", room=1e-6, **options):
    apart = options.get("apart", False)
    checks = {"check_vma": options.get("check_vma", True)}
    through, held = sent(sparsifier, n, dtype, apart, **checks)
    updates = adds_up(scheme, n, dtype, **checks)(through)
    assert updates["w"].dtype == jnp.dtype(dtype)
    assert_conserved(gradients(n, dtype, apart=apart), updates, held, room)
    assert held["w"].any()


@pytest.mark.parametrize(
    ("scheme", "names"),
    [
        ("BalancedParallelism", ("DGC", "RandomK", "QSGD")),
        *helpers.slow(*((scheme, tuple(SPARSIFIERS)) for scheme in SCHEMES)),
    ],
)
def test_every_sparsifier_before_every_scheme(scheme, names):
    for name in names:
        conserves(name, scheme, N)


@pytest.mark.parametrize("n", [3, *helpers.slow(1, 2, 5, 7, 8)])
def test_any_number_of_ranks(n):
    conserves("RandomK", "AGSparse", n)
    conserves("DGC", "HierarchicalCentralization", n)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("bfloat16", "DGC"),
        *helpers.slow(("float16", "DGC"), ("bfloat16", "Dragonn"), ("float16", "TopK")),
    ],
)
def test_16_bit_gradients(dtype, name):
    """Of each element one rank has any, so that their sum needs no rounding."""
    conserves(name, "BalancedParallelism", N, dtype, apart=True)
    _, held = sent(name, N, dtype, True)
    assert held["w"].dtype == np.float32


@pytest.mark.parametrize("name", helpers.slow("DGC", "ReuseThreshold", "QSGD"))
def test_doubles(name):
    with jax.enable_x64(True):
        conserves(name, "BalancedParallelism", N, "float64", room=1e-14)


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("TopK", "AGSparse"),
        *helpers.slow(("DGC", "Zen"), ("RandomK", "Zen, bytes"), ("Dragonn", "SparCML")),
    ],
)
def test_without_checking_types(name, scheme):
    conserves(name, scheme, N, check_vma=False)


def test_the_tables_name_all_there_are():
    def named(module, kind, but=()):
        found = [x for x in vars(module).values() if isinstance(x, type)]
        found = [x for x in found if issubclass(x, kind) and not getattr(x, "selects", 0)]
        return {x.__name__ for x in found} - {kind.__name__, *but}

    kinds = {type(with_room(make)).__name__ for make in SPARSIFIERS.values()}
    bases = {"Selecting", "ByMagnitude", "Rounding"}
    assert named(sparsifiers, base.Sparsifier, bases) == kinds
    kinds = {type(scheme).__name__ for scheme in SCHEMES.values()}
    assert named(schemes, schemes.Scheme, ELSEWHERE) == kinds


# --- In one program.


def whole(tx, grads, mesh=None, axes=AXIS):
    """By rank and step: updates, what is held then, and how many were left out."""
    like = {name: jnp.zeros(x.shape[2:], x.dtype) for name, x in grads.items()}

    def on_rank(grads):
        def step(state, now):
            update, state = tx.update(now, state)
            skipped = sparsejax.metrics(state)["sparsify/skipped"]
            return state, (update, sparsejax.residuals(state), skipped)

        grads = jax.tree.map(lambda x: x[0], grads)
        updates, held, skipped = jax.lax.scan(step, tx.init(like), grads)[1]
        held = jax.tree.map(lambda x: x[:, 0], held)
        return jax.tree.map(lambda x: x[None], (updates, held, skipped))

    mesh = mesh or helpers.mesh_of(len(grads["w"]))
    run = jax.shard_map(on_rank, mesh=mesh, in_specs=P(axes), out_specs=P(axes))
    return jax.tree.map(np.asarray, jax.jit(run)(grads))


def last(held):
    return {name: x[:, -1] for name, x in held.items()}


def test_a_plan_whose_messages_are_too_small():
    """They go in several rounds; what a plan says of a leaf holds for its entries, too."""
    owned = schemes.BalancedParallelism(push_capacity=64, pull_capacity=64)
    entry = lambda name, scheme: sparsejax.LeafPlan(
        name, SHAPES[name], "float32", "element", scheme
    )
    leaves = (entry("bias", schemes.AllReduce()), entry("w", owned))
    own = sparsejax.top_k(0.1, min_size=100)
    tx = sparsejax.sync(sparsejax.Plan(N, leaves), reduce="sum", sparsifier=own)
    grads = gradients(N)
    updates, held, _ = whole(tx, grads)
    assert_conserved(grads, updates, last(held))


def test_two_levels():
    pair = ("hosts", "chips")
    types = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), pair, types, devices=jax.devices("cpu")[:4])
    tx = optax.chain(
        sparsejax.dgc(0.02, min_size=100, axis_name=pair),
        sparsejax.zen_sync(pair, reduce="sum", rules={"w": "sparse"}),
    )
    grads = gradients(N)
    updates, held, _ = whole(tx, grads, mesh, pair)
    assert_conserved(grads, updates, last(held))


def test_a_step_with_a_nan_is_left_out_on_all_ranks():
    bad = [9, 20]
    grads = gradients(N)
    grads["w"][2, 9, 17] = np.nan
    grads["bias"][1, 20, 3] = np.inf
    tx = optax.chain(
        sparsejax.top_k(0.02, min_size=100, skip_nonfinite=True),
        sparsejax.sync(schemes.AGSparse(), reduce="sum", rules={"w": "sparse"}),
    )
    updates, held, skipped = whole(tx, grads)
    assert (skipped == np.cumsum(np.isin(np.arange(STEPS), bad))).all()
    for name in SHAPES:
        assert not updates[name][:, bad].any()
        for step in bad:
            now, before = held[name][:, step], held[name][:, step - 1]
            assert now.tobytes() == before.tobytes()
    good = {name: np.delete(x, bad, axis=1) for name, x in grads.items()}
    assert_conserved(good, updates, last(held))


# --- The law of momentum, and checkpoints.


@pytest.mark.parametrize("masking", [True, *helpers.slow(False)])
def test_momentum_correction_after_a_dense_warm_up(masking):
    """The reference, element by element: dense momentum first, DGC's from then on."""
    n, warm, k, momentum = 2, 6, 60, np.float32(0.9)
    own = sparsejax.top_k(
        k / SIZE,
        memory=sparsejax.MomentumCorrection(0.9, masking=masking),
        min_size=100,
    )
    tx = sparsejax.sync(
        schemes.AGSparse(),
        reduce="sum",
        rules={"w": "sparse"},
        sparsifier=own,
        warmup_steps=warm,
    )
    grads = {"w": gradients(n)["w"]}
    updates, held, _ = whole(tx, grads)
    u = np.zeros((n, SIZE), np.float32)
    v, came = np.zeros_like(u), np.zeros((n, SIZE))
    for step in range(STEPS):
        u = momentum * u + grads["w"][:, step]
        v, came = v + u, came + u
        going = np.ones((n, SIZE), bool)
        if step >= warm:
            least = np.sort(np.abs(v), axis=1)[:, -k][:, None]
            going = np.abs(v) >= least
            u = np.where(going & masking, 0, u)
        went = np.where(going, v, 0).sum(0)
        np.testing.assert_allclose(updates["w"][0, step], went, rtol=1e-5, atol=1e-5)
        v = np.where(going, 0, v)
    waits = last(held)["w"]
    np.testing.assert_allclose(waits, v, rtol=1e-5, atol=1e-5)
    # The stated law, of the velocities.
    total = updates["w"][0].astype(np.float64).sum(0) + waits.astype(np.float64).sum(0)
    np.testing.assert_allclose(total, came.sum(0), rtol=1e-5, atol=1e-4)


def test_a_density_schedule_goes_on_behind_a_checkpoint():
    """Bytes as without: step, thresholds, velocity and residual are all in the state."""
    n, steps, stop = 2, 8, 3
    mesh = helpers.mesh_of(n)
    density = sparsifiers.Warmup(0.01, 6, start=0.2)
    own = sparsifiers.ReuseThreshold(density, every=2)
    memory = sparsejax.MomentumCorrection(0.9)
    tx = optax.chain(
        sparsejax.sparsify(own, memory=memory, min_size=100),
        sparsejax.sync(schemes.AGSparse(), rules={"w": "sparse"}),
    )
    grads = gradients(n)
    first = sparsejax.init(tx, zeros(), mesh)
    specs = sparsejax.state_specs(first)
    step = jax.jit(
        jax.shard_map(
            lambda g, state: tx.update(jax.tree.map(lambda x: x[0], g), state),
            mesh=mesh,
            in_specs=(P(AXIS), specs),
            out_specs=(P(), specs),
        )
    )

    def run(state, start, stop):
        found = []
        for number in range(start, stop):
            now = {name: x[:, number] for name, x in grads.items()}
            update, state = step(now, state)
            found.append(jax.tree.map(np.asarray, update))
        return found, state

    straight, end = run(first, 0, steps)
    before, state = run(first, 0, stop)
    saved = [np.array(x) for x in jax.tree.leaves(state)]
    after, again = run(jax.tree.unflatten(jax.tree.structure(first), saved), stop, steps)
    both = zip(
        jax.tree.leaves((straight, end)),
        jax.tree.leaves((before + after, again)),
        strict=True,
    )
    assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in both)
    # Where a threshold is found, just as many go as the schedule says.
    counts = [int((x["w"] != 0).sum()) for x in straight]
    for number in (0, 2, 4, 6):
        each = int(np.ceil(np.float32(density(jnp.int32(number))) * SIZE))
        assert each < counts[number] <= n * each
    assert counts[0] > 10 * counts[6]
    assert int(find(end, SyncState)[0].step) == steps
