"""Ordered sums: floating-point numbers added in a fixed order.

Floating-point addition is not associative. An ordered sum has the same bits in every run,
and on all devices that are given the same numbers. On GPUs a scatter-add with repeated
indices is not ordered: XLA compiles it to atomic additions, in whatever order threads
arrive. (They also flush float32 denormals to zero.) On CPUs XLA adds in the order of the
indices, so a plain scatter-add is an ordered sum. So it is on TPUs, whose programs have one
order, fixed when they are compiled.

`add_senders` adds the entries of several senders, one sender after another. The indices of
one sender do not repeat, so each addition is a load, an add and a store: a scatter with
`unique_indices=True`. The loop has a static trip count, so the host does not wait for its
turns.

`add_repeated` adds a list whose indices may repeat. It sorts the list by index, so that
equal indices are neighbours, and adds neighbours, a fixed number at a time.

Indices past the end are dropped. Each of them is replaced by a distinct index past the end
(`unique_places`), so that no index repeats.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.platforms import by_platform
from pallas_kernels.types import as_varying, varying_axes


# The rows of a run of equal indices that one kernel adds.
_AT_ONCE = 32
# The senders that one turn of a loop adds. Each is a kernel to compile, but each turn takes
# a further launch.
_UNROLLED = 16


def unique_places(places: jax.Array, size: int) -> jax.Array:
    """Replaces places of `size` or more by distinct ones past the end, in each row.

    Args:
        places: int32 [..., k].
        size: The number of places.
    """
    outside = lax.broadcasted_iota(jnp.int32, places.shape, places.ndim - 1)
    if size + places.shape[-1] > 2**31 - 1:
        # Clipped to int32, where the last ones are equal.
        outside = jnp.minimum(outside, 2**31 - 1 - size)
    return jnp.where(places < size, places, size + outside)


def add_unique(total: jax.Array, places: jax.Array, values: jax.Array) -> jax.Array:
    """Adds rows at places that do not repeat, without atomic additions.

    Args:
        total: [size, ...].
        places: int32 [k]; those of `size` or more are left out.
        values: [k, ...].
    """
    return total.at[unique_places(places, len(total))].add(
        values.astype(total.dtype),
        mode="drop",
        unique_indices=True,
        wrap_negative_indices=False,
    )


def add_senders(
    total: jax.Array,
    places: jax.Array,
    values: jax.Array | Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Adds the rows of several senders, one sender after another.

    Args:
        total: [size, ...].
        places: int32 [senders, k]; those of `size` or more are left out. Others do not
            repeat within a sender.
        values: [senders, k, ...]; or a function of the number of a sender that returns
            [k, ...], so that not all of them need to be in memory at the same time.
    """
    of_sender = values if callable(values) else lambda number: _row(values, number)
    like = jax.eval_shape(of_sender, jnp.int32(0))
    total = as_varying(total, varying_axes(places) | varying_axes(like))

    def turn(number, total):
        return add_unique(total, _row(places, number), of_sender(number))

    if len(places) == 1:
        return turn(np.int32(0), total)
    return lax.fori_loop(0, len(places), turn, total, unroll=min(len(places), _UNROLLED))


def add_repeated(
    total: jax.Array, places: jax.Array, values: jax.Array, distinct: bool = False
) -> jax.Array:
    """Adds rows at places that may repeat.

    Args:
        total: [size, ...].
        places: int32 [k]; those of `size` or more are left out.
        values: [k, ...].
        distinct: Whether places below `size` do not repeat; then nothing is sorted.
    """
    if not values.size:
        return total
    operands = total, places, values.astype(total.dtype)
    plain = _added_as_they_come
    default, tpu = (add_unique, None) if distinct else (_added_by_runs, plain)
    return by_platform(*operands, cpu=plain, tpu=tpu, default=default)


def _added_as_they_come(total, places, values):
    return total.at[places].add(values, mode="drop", wrap_negative_indices=False)


def _added_by_runs(total, places, values):
    """Sorts rows by place, sums each run of equal places in its first row, and adds these.

    After the first turn a row has the sum of up to `_AT_ONCE` rows of its run, from itself
    on; each further turn multiplies that number by `_AT_ONCE`. Each turn only updates every
    `_AT_ONCE`-th of the rows that the previous one updated. Other rows have partial sums,
    and are dropped at the end.
    """
    k = len(places)
    at = lax.iota(jnp.int32, k)
    places, order = lax.sort((places, at), num_keys=1)
    begins = jnp.concatenate([jnp.ones(1, bool), places[1:] != places[:-1]])
    rank = at - lax.cummax(jnp.where(begins, at, 0))
    rows, span = values[order], 1
    while span < k:
        is_meant = rank % min(span * _AT_ONCE, 2**31 - 1) == 0
        sums = rows
        for step in range(span, min(span * _AT_ONCE, k), span):
            other = jnp.minimum(at + step, k - 1)
            is_of_run = is_meant & (at + step < k) & (places[other] == places)
            # Rows that are not updated read their own row, which is in the cache.
            read = rows.at[jnp.where(is_of_run, other, at)].get(mode="promise_in_bounds")
            mask = is_of_run.reshape(k, *[1] * (rows.ndim - 1))
            sums = sums + jnp.where(mask, read, 0)
        # Without the barrier XLA could recompute a turn in each kernel of the next.
        rows, span = lax.optimization_barrier(sums), span * _AT_ONCE
    return add_unique(total, jnp.where(begins, places, len(total)), rows)


def _row(x, number):
    """Returns x[number], for a number in range, without bounds checks."""
    return lax.dynamic_index_in_dim(x, number, keepdims=False, allow_negative_indices=False)
