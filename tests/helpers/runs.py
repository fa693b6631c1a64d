"""Runs over simulated ranks: of functions, of schemes, and of transformations."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from sparsejax.axes import as_varying, varying_axes
from sparsejax.units.dense import Dense
from sparsejax.wire.collectives import Wire
from tests.helpers.meshes import AXIS, mesh_of, shard_map
from tests.helpers.oracle import places_of


WIRE = Wire(AXIS)


def stacked(fn: Callable, n: int, check_vma: bool = True, mesh: Any = None) -> Callable:
    """Maps fn over n ranks: from arrays [n, ...], a row a rank, to results [n, ...]."""
    specs = {"mesh": mesh or mesh_of(n), "in_specs": P(AXIS), "out_specs": P(AXIS)}

    def on_rank(*args):
        result = fn(*jax.tree.map(lambda x: x[0], args))
        return jax.tree.map(lambda y: y[None], result)

    return shard_map(on_rank, **specs, check_vma=check_vma)


def ranked(fn: Callable, n: int, check_vma: bool = True, mesh: Any = None) -> Callable:
    """Maps fn as `stacked` does, compiled, with results in NumPy."""
    compiled = jax.jit(stacked(fn, n, check_vma, mesh))
    return lambda *args: jax.tree.map(np.asarray, compiled(*args))


def run_ranks(
    fn: Callable, x: Any, n: int, check_vma: bool = True, mesh: Any = None
) -> Any:
    """Runs fn once on n ranks; x and the results are stacked by rank."""
    return ranked(fn, n, check_vma, mesh)(x)


class Run(NamedTuple):
    """The results of a transformation on ranks; every array has a leading rank axis.

    Attributes:
        updates: The updates of all steps, [n, steps, ...].
        state: The last state.
        seen: What `watch` returned of the state of each step, [n, steps, ...].
    """

    updates: Any
    state: Any
    seen: Any


def ranks(n: int, *, mesh: Any = None, axes: Any = AXIS, check_vma: bool = True):
    """Runs a transformation on n ranks: `ranks(n)(tx, grads)`, all steps in one program.

    Gradients are a dict of arrays [n, steps, ...]. `watch` is a function of the state of a
    step, whose results are returned as `seen`.
    """

    def run(tx, grads, watch: Callable = lambda state: ()) -> Run:
        params = {name: jax.numpy.ones(x.shape[2:], x.dtype) for name, x in grads.items()}

        def on_rank(grads):
            def step(state, grad):
                updates, state = tx.update(grad, state, params)
                return state, (updates, watch(state))

            grads = jax.tree.map(lambda x: x[0], grads)
            state, (updates, seen) = jax.lax.scan(step, tx.init(params), grads)
            return jax.tree.map(lambda x: x[None], Run(updates, state, seen))

        program = shard_map(
            on_rank,
            mesh=mesh or mesh_of(n),
            in_specs=P(axes),
            out_specs=P(axes),
            check_vma=check_vma,
        )
        return jax.tree.map(np.asarray, jax.jit(program)(grads))

    return run


def is_replicated(fn: Callable, x: Any, n: int) -> bool:
    """Returns whether all results of fn are typed as invarying over the ranks."""
    types = []

    def on_rank(x):
        result = jax.tree.leaves(fn(jax.tree.map(lambda x: x[0], x)))
        types.extend(jax.typeof(y).manual_axis_type.varying for y in result)
        return 0

    specs = {"mesh": mesh_of(n), "in_specs": P(AXIS), "out_specs": P()}
    jax.eval_shape(shard_map(on_rank, **specs), x)
    assert types, "fn returns nothing"
    return not any(types)


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """Yields a list, to which an item is appended for each program compiled inside."""
    compiled: list[str] = []

    def note(event, _, **__):
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield compiled
    finally:
        # Only this listener: `conftest` has one that counts programs, too.
        jax.monitoring.unregister_event_duration_listener(note)


def octets(tree: Any) -> dict[str, bytes | int | str]:
    """Returns the arrays of a tree as bytes, by path; ints and strs are unchanged."""

    def one(x):
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        return x if isinstance(x, int | str) else np.asarray(x).tobytes()

    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(keys): one(x) for keys, x in pairs}


def assert_same_on_all_ranks(results: Any) -> None:
    """Raises unless the rows of every array, one for each rank, have the same bytes."""
    for keys, leaf in jax.tree_util.tree_leaves_with_path(results):
        rows = np.asarray(leaf)
        for rank in range(1, len(rows)):
            if rows[rank].tobytes() == rows[0].tobytes():
                continue
            where = places_of((_bytes_of(rows[rank]) != _bytes_of(rows[0])).any(-1))
            leaf_is = f" of {jax.tree_util.keystr(keys)}" if keys else ""
            raise AssertionError(f"rank {rank} differs from rank 0 in {where}{leaf_is}")


def _bytes_of(x):
    """Returns x as uint8 [..., itemsize]; zeros of both signs and NaNs differ in it."""
    return np.frombuffer(x.tobytes(), np.uint8).reshape(*x.shape, x.itemsize)


# --- Schemes.


def call(scheme: Any, x: Any, state: Any = None, axis: Any = AXIS, present: Any = None):
    """Calls a scheme with a dense array over a mesh axis, inside of `ranked` or the like.

    Without a state it is given its first one. With two levels the traffic is the largest of
    a host's ranks, as in an exchange.
    """
    state = init(scheme, x, axis) if state is None else state
    done = scheme(Dense(x, present), state, Wire(axis))
    outer = Wire(axis if isinstance(axis, str) else axis[0])
    return done._replace(traffic=outer.agree(done.traffic))


def init(scheme: Any, like: Any, axis: Any = AXIS) -> Any:
    """Returns a scheme's first state over a mesh axis, inside of `ranked` or the like."""
    return scheme.init(jax.ShapeDtypeStruct(like.shape, like.dtype), Wire(axis))


def first_state(scheme: Any, like: Any, n: int) -> Any:
    """Returns a scheme's first state on n ranks; it is called outside of them."""
    made = lambda _: init(scheme, like)
    return jax.vmap(made, axis_name=AXIS, out_axes=None)(np.zeros(n, np.float32))


def parameters(grads: Any, *names: str) -> Any:
    """Returns parameters for local gradients, inside `shard_map`: replicated zeros.

    The axis of the ranks is "data" if no names are given.
    """

    def one(x):
        over = varying_axes(x) - set(names or (AXIS,))
        return as_varying(jnp.zeros(x.shape, x.dtype), over)

    return jax.tree.map(one, grads)
