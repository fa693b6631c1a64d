"""Losses that read a table, and how many rows of it their gradients have.

Each is called with a way to look up, the parameters, and ids [3, 2], all in bounds.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name


HEIGHT, WIDTH = 17, 3
IDS = np.array([[1, 2], [2, 5], [7, 1]], np.int32)


class Case(NamedTuple):
    loss: Callable[..., Any]
    rows: int | None  # None: the gradient of the table is dense
    tolerance: float


CASES: dict[str, Case] = {}


def case(rows, tolerance=1e-5):
    def keep(loss):
        CASES[loss.__name__] = Case(loss, rows, tolerance)
        return loss

    return keep


def params():
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    return {
        "scale": jnp.float32(1.5),
        "stack": normal(4, 2, WIDTH),
        "table": normal(HEIGHT, WIDTH),
        "u": normal(WIDTH, WIDTH),
        "w": normal(WIDTH),
    }


def take(table, ids):
    return jnp.take(table, ids, axis=0)


def nothing(ids):
    """A zero that varies over the ranks as the ids do, for what scans carry."""
    return 0.0 * ids.reshape(-1)[0]


def score(look, p, ids):
    return jnp.sin(look(p["table"], ids) @ p["w"]).sum()


# --- Once, and several times.


@case(rows=6)
def once(look, p, ids):
    return score(look, p, ids)


@case(rows=8)
def twice(look, p, ids):
    return score(look, p, ids) + (look(p["table"], ids[0]) ** 2).sum()


@case(rows=1)
def one_id(look, p, ids):
    return score(look, p, ids[0, 0])


@case(rows=None)
def no_id(look, p, ids):
    return score(look, p, ids[:0])


@case(rows=4)
def rows_of_two_axes(look, p, ids):
    return score(look, p, ids[:2]) + jnp.sin(take(p["stack"], ids[0] % 2)).sum()


# --- Loops.


@case(rows=6)
def scan(look, p, ids):
    def turn(carry, ids):
        return carry * 0.5 + score(look, p, ids) * carry, carry

    start = 1.0 + nothing(ids)
    last, all_of_them = lax.scan(turn, start, ids, reverse=True, unroll=2)
    return last + (all_of_them**2).sum()


@case(rows=3)
def scan_that_reads_for_the_next_turn(look, p, ids):
    def turn(h, ids):
        return jnp.tanh(h @ p["u"] + look(p["table"], ids[0])), h

    return (lax.scan(turn, jnp.ones(WIDTH) + nothing(ids), ids)[1] * p["w"]).sum()


@case(rows=6)
def scan_that_returns_what_it_carries(look, p, ids):
    def turn(table, ids):
        return table, score(look, {**p, "table": table}, ids)

    table, scores = lax.scan(turn, p["table"], ids)
    return scores.sum() + 0.0 * score(look, {**p, "table": table}, ids[:0])


@case(rows=None)
def scan_that_changes_the_table(look, p, ids):
    def turn(table, ids):
        return table * 0.5, score(look, {**p, "table": table}, ids)

    return lax.scan(turn, p["table"] + nothing(ids), ids)[1].sum()


@case(rows=None)
def scan_that_replaces_the_table(look, p, ids):
    def turn(table, ids):
        other = jnp.ones((HEIGHT, WIDTH)) + nothing(ids)
        return other, score(look, {**p, "table": table}, ids)

    return lax.scan(turn, p["table"] + nothing(ids), ids)[1].sum()


@case(rows=6)
def scan_over_the_table_without_a_gradient(look, p, ids):
    def turn(carry, row):
        return jnp.maximum(carry * p["scale"], lax.stop_gradient(row).sum()), None

    return score(look, p, ids) * lax.scan(turn, 1.0 + nothing(ids), p["table"])[0]


@case(rows=None)
def scan_over_the_table(look, p, ids):
    turn = lambda carry, row: (carry + jnp.sin(row).sum(), None)
    return score(look, p, ids) + lax.scan(turn, nothing(ids), p["table"])[0]


@case(rows=None)
def scan_of_no_turns(look, p, ids):
    def turn(carry, _):
        return (jnp.zeros_like(carry[0]) + nothing(ids), score(look, p, ids)), None

    start = p["table"] + nothing(ids), nothing(ids)
    table, total = lax.scan(turn, start, None, length=0)[0]
    return (table**2).sum() + total + score(look, p, ids)


@case(rows=12)
def scan_in_scan(look, p, ids):
    def outer(carry, ids):
        inner = lambda carry, at: (carry * 0.9 + score(look, p, at), None)
        return lax.scan(inner, carry, jnp.concatenate([ids, (ids + 1) % HEIGHT]))[0], None

    return lax.scan(outer, nothing(ids), ids)[0]


# --- Programs in programs.


@case(rows=6)
def remat(look, p, ids):
    return jax.checkpoint(lambda p, ids: score(look, p, ids))(p, ids)


@case(rows=6)
def remat_that_scales_and_returns(look, p, ids):
    def inner(table, scale, ids):
        scaled = table * jnp.sin(scale)
        return score(look, {**p, "table": scaled}, ids), scaled, table

    value, scaled, table = jax.checkpoint(inner)(p["table"], p["scale"], ids)
    seen = lax.stop_gradient(scaled).sum() + lax.stop_gradient(table).max()
    return value * seen + (take(table, ids[:0]) ** 2).sum()


@case(rows=6)
def scan_of_remat(look, p, ids):
    turn = jax.checkpoint(lambda carry, ids: (carry * 0.5 + score(look, p, ids), None))
    return lax.scan(turn, nothing(ids), ids)[0]


@case(rows=6)
def vmap_along_other_axes(look, p, ids):
    read = lambda ids: jnp.sin(look(p["table"], ids))
    return (jax.vmap(read, in_axes=1, out_axes=1)(ids) @ p["w"]).sum()


@case(rows=None)
def vmap_over_tables(look, p, ids):
    tables = jnp.stack([p["table"], 2 * p["table"]])
    read = jax.vmap(take)(tables, ids[:2])
    return (jnp.sin(read) @ p["w"]).sum()


@case(rows=7)
def jit_that_returns_the_table(look, p, ids):
    same = jax.jit(lambda table: (table, table * 2, table.sum()))
    table, twice, _ = same(p["table"])
    return score(look, {**p, "table": twice}, ids) + score(look, {**p, "table": table}, 0)


@case(rows=8)
def cond_of_operands(look, p, ids):
    yes = lambda p: score(look, p, ids)
    no = lambda p: (look(p["table"], ids[0]) ** 2).sum()
    return lax.cond(ids[0, 0] > 3, yes, no, p)


@case(rows=9)
def scan_of_switch(look, p, ids):
    def turn(carry, ids):
        some = lambda: score(look, p, ids)
        none = lambda: 0.0 * carry + nothing(ids)
        one = lambda: score(look, p, ids[1]) * p["scale"]
        return carry + lax.switch(ids[0] % 3, [some, none, one]), None

    return lax.scan(turn, nothing(ids), ids)[0]


@case(rows=None)
def cond_that_returns_the_table(look, p, ids):
    one = lambda table: 2.0 * table
    table = lax.cond(ids[0, 0] > 0, one, lambda table: table + 1.0, p["table"])
    return score(take, {**p, "table": table}, ids) + score(take, p, ids[0])


@case(rows=None)
def remat_that_returns_what_it_has_scaled(look, p, ids):
    table = jax.checkpoint(lambda table, scale: table * scale)(p["table"], p["scale"])
    return score(take, {**p, "table": table}, ids) + score(take, p, ids[0])


# --- What is done to each number.


@case(rows=6, tolerance=3e-2)
def cast_in_jit(look, p, ids):
    half = jax.jit(lambda p: jax.tree.map(lambda x: x.astype(jnp.bfloat16), p))(p)
    return score(look, half, ids).astype(jnp.float32)


@case(rows=6)
def scaled_by_a_parameter(look, p, ids):
    return score(look, {**p, "table": -p["table"] * p["scale"] / 2.0}, ids)


@case(rows=6)
def copied_and_named(look, p, ids):
    table = checkpoint_name(jnp.array(p["table"], copy=True), "table")
    return score(look, {**p, "table": table}, ids)


# --- Ids and modes.


@case(rows=6)
def out_of_range(look, p, ids):
    far = ids * jnp.array([[-1, 1], [9, 1], [-30, 50]])
    return jnp.nansum((look(p["table"], far) @ p["w"]) ** 2)


@case(rows=6)
def fill_behind_a_scale(look, p, ids):
    far = ids * jnp.array([[-1, 1], [9, 1], [-30, 50]])
    scaled = (p["table"] * p["scale"]).at[far].get(mode="fill", fill_value=2.0)
    return jnp.sin(scaled @ p["w"]).sum()


@case(rows=10)
def indices_and_slices(look, p, ids):
    table = p["table"]
    rows = [table[ids[0, 0]], table[-1], *table[3:6], *table[ids[:2, 0], :]]
    moved = lax.dynamic_slice_in_dim(table, ids[0, 1] + 13, 3)
    return (jnp.sin(jnp.stack([*rows, *moved])) @ p["w"]).sum()


@case(rows=8)
def several_rows_each_or_none(look, p, ids):
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(1, 3), collapsed_slice_dims=(), start_index_map=(0, 1)
    )
    # One starts in front of the table, and one beside it.
    starts = jnp.stack([ids[:2] * 3, ids[:2] * 0], -1)
    starts = starts.at[0, 0].set(-1).at[1, 0, 1].set(1)
    rows = lax.gather(p["table"], starts, numbers, (2, WIDTH), mode="fill", fill_value=0.5)
    return (jnp.sin(rows) @ p["w"]).sum()


@case(rows=6)
def rows_in_front_of_ids(look, p, ids):
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(0,), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    rows = lax.gather(p["table"], ids[..., None], numbers, (1, WIDTH), mode="clip")
    return (jnp.sin(rows) * p["w"][:, None, None] * ids).sum()


@case(rows=None)
def rows_at_swapped_indices(look, p, ids):
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(2,), collapsed_slice_dims=(0,), start_index_map=(1, 0)
    )
    starts = jnp.stack([ids * 0, ids], -1)
    rows = lax.gather(p["table"], starts, numbers, (1, WIDTH), mode="clip")
    return (jnp.sin(rows) @ p["w"]).sum()


@case(rows=None)
def parts_of_rows(look, p, ids):
    read = lambda at: lax.dynamic_slice(p["table"], (at, 0), (1, 2))
    return jnp.sin(jax.vmap(read)(ids[0])).sum()


@case(rows=None)
def numbers_of_rows(look, p, ids):
    return p["table"][ids, 1].sum() + p["table"][ids, 1:].sum()


@case(rows=None)
def every_second_row(look, p, ids):
    return (jnp.sin(p["table"][::2]) @ p["w"]).sum()


# --- Other uses of the table.


@case(rows=None)
def tied(look, p, ids):
    h = jnp.tanh(take(p["table"], ids) @ p["u"])
    return -jax.nn.log_softmax(h @ p["table"].T)[..., 0].sum()


@case(rows=6)
def stopped(look, p, ids):
    return score(look, p, ids) * lax.stop_gradient(jnp.linalg.norm(p["table"]))


@case(rows=6)
def hard_negatives(look, p, ids):
    h = look(p["table"], ids[:, 0])
    return (h * look(p["table"], jnp.argmax(h @ p["table"].T, -1))).sum()


@case(rows=None)
def by_way_of_memory(look, p, ids):
    memory = jax.new_ref(jnp.zeros((HEIGHT, WIDTH)))
    memory[...] = p["table"] * 2.0
    return score(take, {**p, "table": memory[...]}, ids) + score(take, p, ids)


@case(rows=None)
def custom_vjp_of_the_table(look, p, ids):
    @jax.custom_vjp
    def read(table, ids):
        return take(table, ids)

    def backward(saved, rows):
        table, ids = saved
        return 2 * jnp.zeros_like(table).at[ids].add(rows), None

    read.defvjp(lambda table, ids: (take(table, ids), (table, ids)), backward)
    return score(read, p, ids)
