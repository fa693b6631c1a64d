"""How long a rank's step takes on one GPU: all of it but the network.

The program is the one that each of 16 ranks runs. It is traced for 16, and its collectives
are replaced by copies on the device: an all-to-all returns this rank's own messages, which
are as long as those of others, and an all-gather returns its message once for each rank.
So a step takes what it takes on a rank whose network is infinitely fast. The sum is not
that of the ranks; how many units it has is compared with what 16 ranks would have.

What `benchmarks.device` predicts for the same step stands beside the time. Then JAX's
profiler says which kernels run, how often and for how long.
"""

import contextlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import sparsejax
from benchmarks.device.compiled import ALGORITHM_1, AXIS, IN_ANY_ORDER, transformation
from benchmarks.device.loads import LOADS, RANKS, Load
from benchmarks.gpu import profile
from benchmarks.harness.record import RESULTS, say
from benchmarks.harness.results import Results
from benchmarks.harness.timing import alternate, spread
from benchmarks.kernels import compiled
from sparsejax.units.row_grads import RowGrads


RANK = 3
# Schemes, as `benchmarks.device` names them, and kernels.
SIDES = (
    ("zen", "reference"),
    ("zen", "triton"),
    ("zen", "auto"),
    (IN_ANY_ORDER, "reference"),
    (IN_ANY_ORDER, "triton"),
    ("agsparse", "reference"),
    (ALGORITHM_1, "triton"),
)
# Of the loads of `benchmarks.device`; others of 128 million numbers are in between.
TIMED = (
    "65,536 x 64",
    "793,471 x 512",
    "128M numbers",
    "128M numbers, 0.01%",
    "793,471 x 512, listed",
)
SMALL = Load("64K numbers", 1 << 16, 1, 0.01, 1 << 16)


def steps(context) -> bool:
    """Times a rank's step for each load, by scheme and kernels."""
    loads = [LOADS[name] for name in TIMED] if context.gpu else [SMALL]
    return all([_one_load(context, load) for load in loads])


def _one_load(context, load) -> bool:
    own = _gradient(load)
    density, sides, shares, well = _density(own), {}, {}, True
    say(f"\n{load.name}")
    lowered = {
        (scheme, kernels): _lowered(load, own, scheme, kernels)
        for scheme, kernels in SIDES
        if kernels == "auto" or kernels in context.backends
    }
    for (scheme, kernels), run in compiled.all_of(lowered).items():
        try:
            found = float(_share(run()))
        except Exception as error:
            say(f"  {scheme}, {kernels} failed: {type(error).__name__}: {str(error)[:300]}")
            context.record.add(
                part="steps", load=load.name, scheme=scheme, kernels=kernels,
                failed=str(error)[:1000],
            )  # fmt: skip
            well = False
            continue
        is_known = load.width == 1 and scheme.startswith("zen")
        if is_known and abs(found / density - 1) > 0.03:
            say(f"  {scheme}, {kernels}: {found:.3%} of the sum there, not {density:.3%}")
            well = False
        sides[scheme, kernels], shares[scheme, kernels] = run, found
    times = alternate(sides, context.repeats, context.sample)
    for (scheme, kernels), taken in times.items():
        expected = _predicted(load, scheme, kernels)
        said = f", predicted {1e3 * expected:.2f} ms" if expected else ""
        say(f"  {scheme + ', ' + kernels:32} {spread(taken)}{said}")
        context.record.add(
            part="steps", load=load.name, scheme=scheme, kernels=kernels, seconds=taken,
            predicted=expected, density=shares[scheme, kernels],
        )  # fmt: skip
    for (scheme, kernels), run in sides.items():
        _profile(context, load, scheme, kernels, run)
    return well


def _gradient(load: Load):
    """A rank's gradient, on the device: an array, or its ids and rows."""
    rng = np.random.default_rng(RANK)
    if load.listed:
        ids = jnp.asarray(load.ids()[RANK])
        rows = rng.standard_normal((load.listed, load.width), np.float32)
        return ids, jnp.asarray(rows)
    if load.width == 1:
        x = rng.standard_normal(load.units, np.float32)
        x[rng.random(load.units, np.float32) >= load.density] = 0
        return (jnp.asarray(x),)
    there = jnp.asarray(load.sets()[RANK])
    draw = jax.jit(lambda key, there: jnp.where(
        there[:, None], jax.random.normal(key, load.shape), 0
    ))  # fmt: skip
    return (jax.block_until_ready(draw(jax.random.key(0), there)),)


def _density(own):
    """The share of the units that the sum of 16 ranks would have, were all independent."""
    there = own[0] != 0
    return 1 - (1 - float(jnp.mean(there))) ** RANKS


@jax.jit
def _share(total):
    rows = total.rows if isinstance(total, RowGrads) else total
    return jnp.mean((rows != 0).reshape(len(rows), -1).any(1))


def _lowered(load, own, scheme, kernels):
    """The step, lowered, and what it is called with."""
    tx = transformation(scheme)
    mesh = jax.make_mesh((1,), (AXIS,), devices=jax.devices()[:1])
    with _alone():
        state = sparsejax.bind(tx, mesh).init({load.leaf: jnp.zeros(load.shape)})

    def run(state, *own):
        x = RowGrads(*own, load.shape) if load.listed else own[0]
        total, _ = tx.update({load.leaf: x}, state)
        return total[load.leaf]

    mapped = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    with jax.set_mesh(mesh), _alone(), sparsejax.use_kernels(kernels):
        return compiled.lowered(mapped, state, *own), (state, *own)


@contextlib.contextmanager
def _alone():
    """While a step is traced: 16 ranks, of which only this one is there."""

    def count(axes):
        return RANKS if AXIS in ((axes,) if isinstance(axes, str) else axes) else 1

    def one(x, axis_name, *_, **__):
        return lax.optimization_barrier(x)

    def gathered(x, axis_name, **_):
        shape = (count(axis_name), *x.shape)
        return lax.optimization_barrier(jnp.broadcast_to(x, shape))

    with contextlib.ExitStack() as patches:
        for name, stand_in in {
            "axis_size": count,
            "axis_index": lambda name: jnp.int32(RANK),
            "psum": one,
            "pmax": one,
            "all_to_all": one,
            "all_gather": gathered,
        }.items():
            patches.enter_context(mock.patch.object(lax, name, stand_in))
        yield


def _predicted(load, scheme, kernels):
    """What `benchmarks.device` predicts of the device's time; None if it says nothing."""
    (path,) = sorted(RESULTS.glob("device-jax*.jsonl"))[-1:] or (None,)
    if path is None:
        return None
    rows = Results(path).where(
        load=load.name, scheme=scheme, kernels=counted_with(scheme, kernels)
    )
    return rows[0]["device"] if rows else None


def counted_with(scheme: str, kernels: str) -> str | None:
    """The kernels that rows of `benchmarks.device` name: none for plain XLA."""
    is_usual = kernels == "reference" or scheme == ALGORITHM_1
    return None if is_usual else kernels


def _profile(context, load, scheme, kernels, run):
    """Which kernels run in a step, how often, and for how long."""
    try:
        rows = profile.kernels(run)
    except Exception as error:
        say(
            f"  {scheme}, {kernels}: no profile: {type(error).__name__}: {str(error)[:200]}"
        )
        return
    busy = sum(seconds for _, _, seconds in rows)
    launches = sum(count for _, count, _ in rows)
    say(f"  {scheme}, {kernels}: {launches:.0f} launches, busy {1e3 * busy:.3f} ms")
    for name, count, seconds in rows[:14]:
        say(f"      {1e6 * seconds:9.1f} us {count:6.1f} x  {name[:90]}")
    context.record.add(
        part="profile", load=load.name, scheme=scheme, kernels=kernels, busy=busy,
        launches=launches, longest=rows[:40],
    )  # fmt: skip
