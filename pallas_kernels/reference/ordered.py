"""Ordered sums: floating-point numbers added in a fixed order.

Floating-point addition is not associative. An ordered sum has the same bits in every run,
and on all devices that are given the same numbers. A scatter-add whose indices repeat is no
ordered sum on GPUs: XLA compiles it to atomic additions, whose order is that in which
threads happen to arrive. (They also take float32 denormals for zero.) On CPUs XLA adds in
the order of the indices, and there a plain scatter-add is an ordered sum. So it is on TPUs,
whose programs have one order, fixed when they are compiled.

`add_senders` adds what several senders have sent, one sender after another. No index
repeats within what one sender has sent, so each addition is a load, an add and a store: a
scatter with `unique_indices=True`. The loop has a known trip count, and the host waits for
none of its turns.

`add_repeated` adds a list whose indices may repeat. It sorts the list by its indices, which
makes equal ones neighbours, and adds neighbours, a fixed number at a time.

Indices that are left out lie past the end and are dropped. Each is given an index of its
own there (`unique_places`), so that no index repeats.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.platforms import by_platform
from pallas_kernels.types import as_varying, varying_axes


# How many rows of a run of equal indices are added by one kernel.
_AT_ONCE = 32
# So many senders are added by a turn of a loop, each by a kernel to compile: a turn takes a
# launch more.
_UNROLLED = 16


def unique_places(places: jax.Array, size: int) -> jax.Array:
    """The places below `size` as they are, others past the end, distinct in each row.

    Args:
        places: int32 [..., k].
        size: How many places there are.
    """
    outside = lax.broadcasted_iota(jnp.int32, places.shape, places.ndim - 1)
    if size + places.shape[-1] > 2**31 - 1:
        # Where int32 ends, so do they.
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
    """Adds what senders have sent, one sender after another.

    Args:
        total: [size, ...].
        places: int32 [senders, k]; those of `size` or more are left out. No other repeats
            within a sender.
        values: [senders, k, ...]; or a function from the number of a sender to [k, ...],
            where all of them need not be there at the same time.
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
        distinct: Whether none repeats that is not left out: then nothing is sorted.
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
    """Sorts by place; then each row gets the sum of the run of equal places it begins.

    After the first turn a row has the sum of the `_AT_ONCE` rows from it on, as far as the
    run goes; after the next, of that many times as many. Only every `_AT_ONCE`-th row of a
    run is looked at again. Other rows hold a part of the sum, and are left out at the end.
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
            # What is not meant reads its own row, which is in the cache.
            read = rows.at[jnp.where(is_of_run, other, at)].get(mode="promise_in_bounds")
            mask = is_of_run.reshape(k, *[1] * (rows.ndim - 1))
            sums = sums + jnp.where(mask, read, 0)
        # Else XLA might compute a turn again in each kernel of the next.
        rows, span = lax.optimization_barrier(sums), span * _AT_ONCE
    return add_unique(total, jnp.where(begins, places, len(total)), rows)


def _row(x, number):
    """x[number], of a number that is known to be in range: no test is compiled."""
    return lax.dynamic_index_in_dim(x, number, keepdims=False, allow_negative_indices=False)
