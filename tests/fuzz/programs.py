"""Programs, compiled once: from arrays [ranks, ...] to results [ranks, ...]."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparsejax
from sparsejax import schemes, sparsifiers
from sparsejax.axes import as_varying, varying_axes
from sparsejax.schemes.base import LossyScheme
from sparsejax.transforms.sync import narrowed
from sparsejax.units.row_grads import RowGrads, is_row_grads
from sparsejax.wire import ladder
from tests import helpers
from tests.fuzz import messages
from tests.fuzz.pool import LADDERS, LOSSY, Program
from tests.laws.test_exact_sum import SCHEMES


AXIS = helpers.AXIS
DENSITY = 0.1
OF_LOSSY = {
    "GTopk": schemes.GTopk(DENSITY),
    "SparDL": schemes.SparDL(DENSITY),
    "SparDL, teams": schemes.SparDL(DENSITY, teams=2),
    "OkTopk": schemes.OkTopk(DENSITY, threshold_every=2, repartition_every=3),
    "OkTopk, rotated": schemes.OkTopk(
        DENSITY, threshold_every=2, split="rotated", bucket=2
    ),
    "PowerSGD": schemes.PowerSGD(2),
}
SPARSIFIERS = {
    "top_k": sparsifiers.TopK(DENSITY),
    "dgc": sparsifiers.DGC(DENSITY),
    "random_k": sparsifiers.RandomK(DENSITY),
    "threshold": sparsifiers.Threshold(DENSITY, 1.5),
}
EVERY, WARM = 3, 1

compiled_so_far = 0


@functools.cache
def compiled(program: Program) -> Callable[..., Any]:
    """The program, as a function of NumPy arrays."""
    global compiled_so_far
    like, on_rank = _MAKERS[program.law](program)
    with traced_as(program):
        if program.mapped == "vmap":
            mapped = jax.vmap(on_rank, axis_name=AXIS)
        else:
            checks = program.mapped == "shard_map"
            mapped = helpers.stacked(on_rank, program.ranks, check_vma=checks)
        made = jax.jit(mapped).lower(*like).compile()
    compiled_so_far += 1

    def run(*arrays):
        with widths(program):
            return jax.tree.map(np.asarray, made(*arrays))

    return run


@contextlib.contextmanager
def traced_as(program: Program):
    """While it is traced: its sizes of messages, its platform, its widest numbers."""
    with contextlib.ExitStack() as stack:
        for name, value in LADDERS[program.ladder].items():
            stack.enter_context(mock.patch.object(ladder, name, value))
        if program.gpu:
            stack.enter_context(helpers.for_gpus())
        stack.enter_context(widths(program))
        yield


def widths(program: Program) -> contextlib.AbstractContextManager:
    """With numbers of 64 bits where it has some."""
    has_doubles = "64" in program.dtype + program.indices
    return jax.enable_x64(True) if has_doubles else contextlib.nullcontext()


def shapes(program: Program) -> dict[str, tuple[tuple[int, ...], str]]:
    """The shape and the dtype of each leaf of its tree."""
    leaves = {"w": (program.shape, program.dtype)}
    match program.tree:
        case "with a bias":
            leaves["bias"] = ((7,), program.dtype)
        case "with empty leaves":
            leaves |= {
                "none": ((0,), program.dtype),
                "no rows": ((0, 3), program.dtype),
                "scalar": ((), program.dtype),
            }
        case "with a table":
            leaves["embedding"] = ((61, 5), program.dtype)
        case "of two dtypes":
            leaves["half"] = ((129,), "bfloat16")
    return leaves


def transformation(program: Program) -> optax.GradientTransformation:
    """What updates the tree of a program."""
    name, reduce = program.scheme, {"reduce": program.reduce}
    if name.startswith("sparsifier"):
        kind = SPARSIFIERS[name.split()[1]]
        select = sparsejax.sparsify(kind, min_size=10, axis_name=AXIS)
        sync = sparsejax.sync(schemes.Zen(), AXIS, rules={"^w$": "sparse"}, **reduce)
        tx = optax.chain(select, sync)
    elif name in LOSSY:
        tx = sparsejax.sync(OF_LOSSY[name], AXIS, rules={"^w$": "sparse"}, **reduce)
    else:
        tx = sparsejax.sync(SCHEMES[name], AXIS, rules={"": "sparse"}, **reduce)
    for wrapper in program.wrapper.split(" in "):
        if wrapper == "accumulate":
            tx = sparsejax.accumulate(tx, EVERY, AXIS, **reduce)
        elif wrapper == "warm_up":
            tx = sparsejax.warm_up(tx, WARM)
        elif wrapper == "skip_nonfinite":
            tx = sparsejax.skip_nonfinite(tx, AXIS)
    return tx


def _sum(program):
    scheme = SCHEMES[program.scheme]
    scheme = narrowed(scheme, jnp.bfloat16) if program.narrow else scheme
    if program.room:
        room = {"push_capacity": program.room, "pull_capacity": program.room}
        scheme = dataclasses.replace(scheme, **room)

    def on_rank(x):
        reduced = helpers.call(scheme, x[0])
        assert reduced.left is None
        return reduced.total, reduced.traffic.as_one()

    return [_like(program, 1, *program.shape)], on_rank


def _chosen(program):
    scheme = OF_LOSSY[program.scheme]
    assert isinstance(scheme, LossyScheme)

    def on_rank(x):
        like = jax.ShapeDtypeStruct(program.shape, x.dtype)
        over = varying_axes(x)

        def step(carry, now):
            state, held = carry
            reduced = helpers.call(scheme, now + held, state)
            found = reduced.total, reduced.left, reduced.traffic.as_one()
            return (reduced.state, as_varying(reduced.left, over)), found

        state = helpers.first_state(scheme, like, program.ranks)
        start = state, as_varying(jnp.zeros(program.shape, x.dtype), over)
        return as_varying(jax.lax.scan(step, start, x)[1], over)

    return [_like(program, program.steps, *program.shape)], on_rank


def _tree(program):
    tx, leaves = transformation(program), shapes(program)
    like = {
        name: jax.ShapeDtypeStruct((program.ranks, program.steps, *shape), dtype)
        for name, (shape, dtype) in leaves.items()
    }

    def on_rank(grads):
        params = {name: jnp.zeros(*leaf) for name, leaf in leaves.items()}

        def step(state, grad):
            updates, state = tx.update(grad, state, params)
            return state, updates

        state, updates = jax.lax.scan(step, tx.init(params), grads)
        return helpers.Run(updates, state, _told(state))

    return [like], on_rank


def is_elements(program: Program) -> bool:
    """Whether entries are numbers, also of a matrix; else rows of one."""
    return len(program.shape) == 1 or program.shape[1] == 4


def _entries(program):
    scheme = None if program.scheme == "none" else SCHEMES[program.scheme]
    options = {"reduce": program.reduce, "rules": {"": "sparse"}}
    tx = sparsejax.sync(scheme or schemes.Zen(), AXIS, **options)

    def on_rank(indices, values):
        tensor = sparsejax.SparseTensor(indices, values, program.shape)
        if program.tree != "alone":
            # As behind a sparsifier, in one bucket with a leaf that is whole.
            zeros = {"w": jnp.zeros(program.shape, program.dtype)}
            zeros["bias"] = jnp.zeros(7, program.dtype)
            bias = as_varying(zeros["bias"], varying_axes(values))
            updates, _ = tx.update({"w": tensor, "bias": bias}, tx.init(zeros))
            return (updates["w"],)
        total = sparsejax.all_reduce(tensor, AXIS, scheme=scheme, reduce=program.reduce)
        return total.indices, total.values

    width = () if is_elements(program) else program.shape[1:]
    return [_ids(program), _like(program, program.listed, *width)], on_rank


def _rows(program):
    rules = {"": "row", "table": "sparse"}
    tx = sparsejax.sync(SCHEMES[program.scheme], AXIS, reduce=program.reduce, rules=rules)

    def on_rank(ids, rows):
        grads = {"table": RowGrads(ids, rows, program.shape)}
        first = tx.init({"table": jnp.zeros(program.shape, program.dtype)})
        updates, state = tx.update(grads, first)
        total = updates["table"]
        found = (total.ids, total.rows) if is_row_grads(total) else (total,)
        return found, _told(state)

    return [_ids(program), _like(program, program.listed, program.shape[1])], on_rank


def _told(state):
    """Bytes of the last step: sent, needed, and what an all-reduce would have sent."""
    told = sparsejax.metrics(state)
    return [told[f"sync/{name}_bytes"] for name in ("wire", "payload", "dense")]


def _ids(program):
    return jax.ShapeDtypeStruct((program.ranks, program.listed), program.indices)


def _like(program, *shape):
    return jax.ShapeDtypeStruct((program.ranks, *shape), program.dtype)


_MAKERS = {
    "sum": _sum,
    "chosen": _chosen,
    "tree": _tree,
    "entries": _entries,
    "rows": _rows,
}


def forget() -> None:
    """Gives back the memory of all programs."""
    compiled.cache_clear()
    messages.forget()
    jax.clear_caches()
