"""States of all kinds that checkpoints hold, in the middle of a training."""

import contextlib
import functools
import resource
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax
from sparsejax.errors import CheckpointError
from sparsejax.state.per_rank import PerRank
from tests import helpers


RANKS = 2
TABLE, KERNEL, BIAS = (60, 4), (20, 8), (3,)
SPARSE = {"table|kernel": "sparse"}  # though they are small


def params_of(mesh, by_columns=False):
    """Small parameters; a table by columns has one column more than two ranks share out."""
    params = {"bias": jnp.zeros(BIAS), "kernel": jnp.zeros(KERNEL)}
    if by_columns:
        return params | {"table": sparsejax.ColumnTable.of(np.zeros((60, 5)), mesh)}
    return params | {"table": jnp.zeros(TABLE)}


def sparsified(every=None, sparsifier=None):
    inside = optax.chain(
        sparsifier or sparsejax.top_k(0.1, min_size=1),
        sparsejax.zen_sync(),
        optax.adam(1e-2),
    )
    return inside if every is None else sparsejax.accumulate(inside, every=every)


# What makes a state, by name.
TRANSFORMATIONS = {
    "dgc and zen": lambda: sparsified(
        sparsifier=sparsejax.dgc(0.1, min_size=1, memory=sparsejax.MomentumCorrection())
    ),
    "accumulate": lambda: sparsified(every=2),
    "spardl": lambda: optax.chain(sparsejax.spardl_sync(0.1, rules=SPARSE), optax.sgd(0.1)),
    "ok_topk": lambda: optax.chain(
        sparsejax.ok_topk_sync(0.1, rules=SPARSE), optax.sgd(0.1)
    ),
    "demo": lambda: sparsejax.rounds.demo(0.01, k=4, chunk=64),
    "striding": lambda: sparsejax.rounds.flex_demo(optax.sgd(0.1), "striding"),
    "pulse_loco": lambda: sparsejax.rounds.pulse_loco(optax.sgd(0.1), every=2),
    "lazy rows": lambda: optax.chain(
        sparsejax.zen_sync(rules=SPARSE), sparsejax.lazy(optax.adam(1e-2))
    ),
    "delayed rows": lambda: optax.chain(
        sparsejax.embrace_sync(delayed=4), sparsejax.lazy(optax.adam(1e-2))
    ),
}
CASES = [*TRANSFORMATIONS, "train state"]


def fresh(name, ranks=RANKS):
    """A state as it is at first, on a mesh of so many ranks."""
    mesh = helpers.mesh_of(ranks)
    if name != "train state":
        params = params_of(mesh, by_columns=name == "delayed rows")
        opt_state = sparsejax.init(TRANSFORMATIONS[name](), params, mesh)
        return {"params": params, "opt_state": opt_state, "epoch": 0, "note": ""}
    trainer = sparsejax.data_parallel(
        lambda params, batch, *, variables, key: (0.0, variables),
        sparsejax.zen_sync(),
        mesh,
        variables={"mean": "mean", "seen": "by_rank"},
    )
    variables = {"mean": jnp.zeros(4), "seen": jnp.zeros((2, 3), jnp.bfloat16)}
    params = {"table": jnp.zeros(TABLE)}
    return trainer.init(params, variables=variables, key=jax.random.key(0))


@functools.cache
def like(name, ranks=RANKS):
    """One of them, to be shared."""
    return fresh(name, ranks)


@functools.cache
def filled(name, ranks=RANKS):
    """A state in the middle of a training, whose numbers follow from where they are."""

    def numbers(keys, x):
        path = jax.tree_util.keystr(keys)
        if isinstance(x, int | str):
            return 3 if isinstance(x, int) else "third"
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.device_put(jax.random.key(7), x.sharding)
        if path.endswith(".ranks"):
            return x
        start = zlib.crc32(path.encode()) % 101
        drawn = (np.arange(x.size).reshape(x.shape) * 7 + start) % 101
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        drawn = ((drawn - 50) / 8 if is_float else drawn % 5).astype(x.dtype)
        return jax.device_put(drawn, x.sharding) if x.committed else jnp.asarray(drawn)

    return jax.tree_util.tree_map_with_path(numbers, like(name, ranks))


def on_host(state):
    """A state as NumPy's arrays, but for keys, numbers and texts."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    keep = lambda x: isinstance(x, int | str) or is_key(x)
    return jax.tree.map(lambda x: x if keep(x) else np.asarray(x), state)


def held(state):
    """What reaches the parameters of what ranks hold: means over them, rows by their id.

    All transformations here average ranks, so a mean over them is what is kept.
    """
    is_ours = lambda x: hasattr(x, "ids") or isinstance(x, PerRank)
    nodes = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_ours)
    found = {}
    for keys, node in nodes:
        path = jax.tree_util.keystr(keys)
        if isinstance(node, PerRank):
            if not node.paths:  # thresholds begin anew, or are averaged
                for below, x in jax.tree_util.tree_leaves_with_path(node.value):
                    place = path + jax.tree_util.keystr(below)
                    found[place] = np.asarray(x, np.float64).mean(0)
        elif hasattr(node, "ids"):
            ids, rows = np.asarray(node.ids), np.asarray(node.rows.value, np.float64)
            sums = np.zeros((node.height + 1, node.dim))
            np.add.at(sums, ids, rows[..., : node.dim])
            found[path] = sums[:-1] / len(ids)
    return found


# --- Of what is refused.

STATE = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "count": 1}
LIKE = {"w": np.zeros((2, 3), np.float32), "count": 0}


def refused(match, function, *args, error=CheckpointError, **options):
    with pytest.raises(error, match=match) as raised:
        function(*args, **options)
    sentence = str(raised.value)
    assert "\n" not in sentence
    assert sentence.rstrip().endswith((".", ")"))
    return sentence


@contextlib.contextmanager
def full_disk():
    """No file can grow beyond a few bytes, which is how a full disk shows itself."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
