"""The law of error feedback, over many steps.

    sum of gradients == sum of updates + residual + pending

for every sparsifier before every scheme, every lossy scheme, and every wrapper around them.
A sparsifier selects the same whichever scheme adds up its entries: so each runs once, over
all steps in one program, and each scheme then adds up what they sent, twenty-odd programs
instead of one for each pair. All sparsifiers have the same capacity, for the same reason.
The sum is one in NumPy's float64.

A new sparsifier, lossy scheme or wrapper is a row of a table here; another scheme is one of
`test_exact_sum`.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax
from sparsejax import schemes, sparsifiers
from sparsejax.schemes.base import LossyScheme
from sparsejax.sparsifiers import base
from sparsejax.transforms import wrappers
from sparsejax.units import ownership
from tests import helpers
from tests.laws.test_exact_sum import SCHEMES as VARIANTS


AXIS = helpers.AXIS
N, STEPS = 4, 32
SIZE, ROOM = 20_011, 392  # long enough for thresholds from a sample
SHAPES = {"w": (SIZE,), "bias": (7,)}  # the second is sent whole
MATRICES = {"w": (131, 153), "bias": (7,)}  # for schemes that send matrices
RULES = {"w": "sparse"}

SPARSIFIERS = {
    "TopK": sparsifiers.TopK,
    "RandomK": sparsifiers.RandomK,
    "Threshold": functools.partial(sparsifiers.Threshold, value=3.0),
    "DGC": sparsifiers.DGC,
    "MSTopK": sparsifiers.MSTopK,
    "GaussianK": sparsifiers.GaussianK,
    "ReuseThreshold": functools.partial(sparsifiers.ReuseThreshold, every=5),
    "Dragonn": sparsifiers.Dragonn,
    "DGC, one round": functools.partial(sparsifiers.DGC, rounds=0, upper=1.05),
    "DGC, warming up": lambda d: sparsifiers.DGC(sparsifiers.Warmup(d / 4, 20, d)),
    "Dragonn, two tables": functools.partial(sparsifiers.Dragonn, slots=1.5, tables=2),
    "Sign": lambda _: sparsifiers.Sign(),
    "QSGD": lambda _: sparsifiers.QSGD(),
    "Striding": sparsifiers.Striding,
    "Visible": lambda _: sparsifiers.Visible(),
}
# The first variant of each scheme of the library, and two more.
SCHEMES = {
    type(scheme).__name__: scheme
    for scheme in reversed(VARIANTS.values())
    if type(scheme).__module__.startswith("sparsejax.")
} | {
    "BalancedParallelism, Algorithm 1": schemes.BalancedParallelism(
        ownership=ownership.MurmurHash(memory=0.1)
    ),
    "Zen, bytes": schemes.Zen("bytes"),
}
OTHERS = [name for name in SCHEMES if name not in ("AGSparse", "BalancedParallelism")]
ELSEWHERE = {"TwoLevel"}  # has a test below


def sync(scheme, axis_name=None, **options):
    return sparsejax.sync(scheme, axis_name, reduce="sum", rules=RULES, **options)


def systems(make):
    return lambda: make(0.02, reduce="sum", rules=RULES)


# What leaves something out by itself. Top-k schemes refuse the entries of a sparsifier.
LOSSY = {
    "TopK": lambda: optax.chain(
        sparsejax.top_k(0.02, min_size=100), sync(schemes.AGSparse())
    ),
    "DGC": lambda: optax.chain(
        sparsejax.dgc(0.02, min_size=100), sync(schemes.BalancedParallelism())
    ),
    "GTopk": lambda: sync(schemes.GTopk(0.02)),
    "SparDL": lambda: sync(schemes.SparDL(0.02)),
    "OkTopk": lambda: sync(schemes.OkTopk(0.02, threshold_every=8, repartition_every=16)),
    # Of the chains that are called systems one: the others have sparsifiers of the table.
    "TopK-DSA": systems(sparsejax.transforms.topk_dsa_sync),
    "PowerSGD": lambda: sync(schemes.PowerSGD(2)),
}
# The last synchronization of `accumulate` is not at the last step: something is pending.
WRAPPERS = {
    "accumulate": lambda tx: sparsejax.accumulate(tx, 3, reduce="sum"),
    "warm_up": lambda tx: sparsejax.warm_up(tx, 5),
    "warm_up in accumulate": lambda tx: sparsejax.accumulate(
        sparsejax.warm_up(tx, 2), 3, reduce="sum"
    ),
    "skip_nonfinite": sparsejax.skip_nonfinite,
}


def with_room(make):
    """The sparsifier with the density for which it makes room for ROOM elements."""
    for k in range(1, ROOM + 1):
        made = make(k / SIZE)
        if isinstance(made, base.Rounding) or made.capacity(SIZE) == ROOM:
            return made
    raise AssertionError(f"no density of {made} makes room for {ROOM}")


def gradients(n, dtype="float32", seed=0, apart=False, shapes=SHAPES):
    """[n, steps, ...] with long tails; `apart`: of each element only one rank has any."""
    rng = np.random.default_rng(seed)
    grads = {k: rng.standard_t(3, (n, STEPS, *shape)) for k, shape in shapes.items()}
    for x in grads.values() if apart else ():
        x *= np.arange(x.shape[2]) % n == np.arange(n)[:, None, None]
    return {k: x.astype(jnp.dtype(dtype)) for k, x in grads.items()}


def zeros(dtype="float32"):
    return {name: jnp.zeros(shape, dtype) for name, shape in SHAPES.items()}


@functools.cache
def sent(name, n, dtype="float32", apart=False, check_vma=True):
    """What a sparsifier lets through, and its state behind; both [n, ...]."""
    tx = sparsejax.sparsify(with_room(SPARSIFIERS[name]), min_size=100)
    grads = gradients(n, dtype, apart=apart)
    return helpers.ranks(n, check_vma=check_vma)(tx, grads)


@functools.cache
def adds_up(name, n, dtype="float32", check_vma=True):
    """From what was sent to updates, by a scheme that itself leaves nothing out."""
    tx, zeros = sync(SCHEMES[name]), {k: jnp.zeros(x, dtype) for k, x in SHAPES.items()}

    def on_rank(entries):
        def step(state, now):
            update, state = tx.update(now, state)
            return state, update

        state, updates = jax.lax.scan(step, tx.init(zeros), entries)
        assert state.residual is None
        return updates

    return helpers.ranked(on_rank, n, check_vma)


def conserves(sparsifier, scheme, n, dtype="float32", room=1e-6, **options):
    apart = options.get("apart", False)
    checks = {"check_vma": options.get("check_vma", True)}
    before = sent(sparsifier, n, dtype, apart, **checks)
    updates = adds_up(scheme, n, dtype, **checks)(before.updates)
    assert updates["w"].dtype == jnp.dtype(dtype)
    both = before._replace(updates=updates)
    helpers.assert_conserved(gradients(n, dtype, apart=apart), both, room)
    assert helpers.held(before.state)["w"].any()


@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        ("BalancedParallelism", "DGC"),
        # What a sparsifier sends is no scheme's matter: each stands before one scheme, and
        # before each scheme stand entries. Those that all ranks share pass by the scheme,
        # and of whole arrays `test_exact_sum` has each.
        *helpers.slow(
            *(("AGSparse", name) for name in SPARSIFIERS),
            *((scheme, "DGC") for scheme in OTHERS),
        ),
    ],
)
def test_every_sparsifier_before_every_scheme(scheme, name):
    conserves(name, scheme, N)


@pytest.mark.slow
def test_ranks_that_are_no_power_of_two_without_checking_types():
    conserves("DGC", "HierarchicalCentralization", 5, check_vma=False)


@pytest.mark.slow
def test_16_bit_gradients():
    """Of each element one rank has any, so that their sum needs no rounding."""
    dtype, name = "bfloat16", "DGC"
    conserves(name, "BalancedParallelism", N, dtype, apart=True)
    residual = sparsejax.residuals(sent(name, N, dtype, True).state)
    assert residual["w"].dtype == np.float32


@pytest.mark.slow
def test_doubles():
    with jax.enable_x64(True):
        conserves("ReuseThreshold", "BalancedParallelism", N, "float64", room=1e-14)


# Of schemes that select: see schemes/top_k/test_top_k.py and transforms/test_wrappers.py.
IN_SHORT = [("TopK", "warm_up in accumulate")]
# Each wrapper around a sparsifier; around a scheme with a state that which takes it back;
# around all two at once.
REST = [
    *(("TopK", wrapper) for wrapper in ("accumulate", "warm_up", "skip_nonfinite")),
    ("OkTopk", "skip_nonfinite"),
    *((name, "warm_up in accumulate") for name in LOSSY if name != "TopK"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "wrapper"), [*IN_SHORT, *helpers.slow(*REST)])
def test_every_wrapper_around_what_leaves_something_out(name, wrapper):
    grads = gradients(N, shapes=MATRICES if name == "PowerSGD" else SHAPES)
    run = helpers.ranks(N)(WRAPPERS[wrapper](LOSSY[name]()), grads)
    helpers.assert_conserved(grads, run)
    kept = helpers.held(run.state)
    assert kept["w"].any()
    # A leaf that is sent whole is pending at most.
    assert kept.get("bias", np.zeros(7)).any() == ("accumulate" in wrapper)


def test_the_tables_name_all_there_are():
    def named(module, kind, but=()):
        types = [x for x in vars(module).values() if isinstance(x, type)]
        return {x.__name__ for x in types if issubclass(x, kind)} - {kind.__name__, *but}

    def check(exported, rows, table, file):
        missing = exported - rows
        assert not missing, f"{missing} are exported and have no row in {table}"
        missing = rows - exported
        assert not missing, f"{missing} have a row in {table} and no line in {file}"

    kinds = {type(with_room(make)).__name__ for make in SPARSIFIERS.values()}
    exported = named(sparsifiers, base.Sparsifier, {"Selector", "ByMagnitude", "Rounding"})
    check(exported, kinds, "SPARSIFIERS", "sparsifiers/__init__.py")
    kinds = {type(scheme).__name__ for scheme in SCHEMES.values()}
    exported = named(schemes, schemes.Scheme, ELSEWHERE) - named(schemes, LossyScheme)
    check(exported, kinds, "SCHEMES of test_exact_sum.py", "schemes/__init__.py")
    missing = named(schemes, LossyScheme) - set(LOSSY)
    assert not missing, "a lossy scheme is a row of LOSSY"
    functions = {
        name
        for name, value in vars(wrappers).items()
        if vars(sparsejax).get(name) is value and inspect.isfunction(value)
    }
    assert functions - {"clip_by_rank"} == set(WRAPPERS) - {"warm_up in accumulate"}


# --- In one program.


@pytest.mark.slow
def test_two_levels():
    pair = ("hosts", "chips")
    mesh = helpers.grid(hosts=2, chips=2)
    tx = optax.chain(
        sparsejax.dgc(0.02, min_size=100, axis_name=pair), sync(schemes.Zen(), pair)
    )
    grads = gradients(N)
    run = helpers.ranks(N, mesh=mesh, axes=pair)(tx, grads)
    helpers.assert_conserved(grads, run)


@pytest.mark.slow
def test_a_step_with_a_nan_is_left_out_on_all_ranks():
    bad = [9, 20]
    grads = gradients(N)
    grads["w"][2, 9, 17] = np.nan
    grads["bias"][1, 20, 3] = np.inf
    tx = optax.chain(sparsejax.top_k(0.02, min_size=100), sync(schemes.AGSparse()))
    tx = sparsejax.skip_nonfinite(tx)
    watch = lambda state: (
        sparsejax.residuals(state),
        sparsejax.metrics(state)["skip/skipped"],
    )
    run = helpers.ranks(N)(tx, grads, watch)
    residuals, skipped = run.seen
    assert (skipped == np.cumsum(np.isin(np.arange(STEPS), bad))).all()
    for name in SHAPES:
        assert not run.updates[name][:, bad].any()
        for step in bad:
            now, before = residuals[name][:, step], residuals[name][:, step - 1]
            assert now.tobytes() == before.tobytes()
    good = {name: np.delete(x, bad, axis=1) for name, x in grads.items()}
    helpers.assert_conserved(good, run)


# --- The law of momentum, and schedules.


@pytest.mark.parametrize("masking", [True, *helpers.slow(False)])
def test_momentum_correction_after_a_dense_warm_up(masking):
    """The reference, element by element: dense momentum first, DGC's from then on."""
    n, steps, size, warm, k, momentum = 2, 16, 6007, 6, 60, np.float32(0.9)
    own = sparsejax.top_k(
        k / size, memory=sparsejax.MomentumCorrection(0.9, masking=masking), min_size=100
    )
    tx = sparsejax.warm_up(optax.chain(own, sync(schemes.AGSparse())), warm)
    tails = np.random.default_rng(0).standard_t(3, (n, steps, size))
    grads = {"w": tails.astype(np.float32)}
    run = helpers.ranks(n)(tx, grads)
    updates, waits = run.updates, sparsejax.residuals(run.state)["w"][:, 0]
    u = np.zeros((n, size), np.float32)
    v, came = np.zeros_like(u), np.zeros((n, size))
    for step in range(steps):
        u = momentum * u + grads["w"][:, step]
        v, came = v + u, came + u
        going = np.ones((n, size), bool)
        if step >= warm:
            least = np.sort(np.abs(v), axis=1)[:, -k][:, None]
            going = np.abs(v) >= least
            u = np.where(going & masking, 0, u)
        went = np.where(going, v, 0).sum(0)
        np.testing.assert_allclose(updates["w"][0, step], went, rtol=1e-5, atol=1e-5)
        v = np.where(going, 0, v)
    np.testing.assert_allclose(waits, v, rtol=1e-5, atol=1e-5)
    # The stated law, of the velocities.
    total = updates["w"][0].astype(np.float64).sum(0) + waits.astype(np.float64).sum(0)
    np.testing.assert_allclose(total, came.sum(0), rtol=1e-5, atol=1e-4)
