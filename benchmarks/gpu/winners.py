"""Every operation by every backend: which is the fastest, and how near to what it could be.

What a backend returns is compared with what the reference does, before it is timed. All
programs of a size and a density are compiled side by side, and all sides of an operation
take turns. The table of winners is written again after each operation.
"""

import dataclasses
import functools
import json
import math
import statistics

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as kernels
from benchmarks.gpu import profile
from benchmarks.harness.record import say
from benchmarks.harness.timing import alternate, spread
from benchmarks.kernels import operations, sparsifiers as published
from benchmarks.kernels.compiled import together
from pallas_kernels import backends, rank_select, striping
from sparsejax import sparsifiers
from sparsejax.units.bits import Slots
from sparsejax.wire import formats, index_codes, ladder


PARTS = 16
TARGETS, TABLE = 0.028, 0.01  # densities: of what is to be reached, and of the winners
MEDIUM = 1 << 24  # the largest at which what sorts is timed


def winners(context) -> bool:
    """Times by operation, backend and size, and the table of the fastest."""
    try:
        return _all_sizes(context)
    finally:
        _targets(context)


def _all_sizes(context) -> bool:
    cases = [(size, TARGETS) for size in context.targets]
    cases += [(size, TABLE) for size in context.sizes]
    table: dict[str, dict[int, str]] = {}
    return all([_one_case(context, size, density, table) for size, density in cases])


def _one_case(context, size, density, table) -> bool:
    """Times on data of one size and density; were all results right?"""
    by_operation = _sides(context, size, density)
    programs = together(
        {
            (operation, name): call
            for operation, (_, sides) in by_operation.items()
            for name, call in sides.items()
        }
    )
    well = True
    for operation, (over, sides) in by_operation.items():
        times, wrong = _timed(
            context, operation, {name: programs[operation, name] for name in sides}
        )
        well &= not wrong
        about = {"part": operation, "size": size, "density": density}
        say(f"\n{operation}: {size:,} elements, {density:.1%}")
        for name, why in wrong.items():
            say(f"  {name:20} WRONG: {why}")
            context.record.add(**about, side=name, wrong=why)
        busy = {name: _busy(context, programs[operation, name]) for name in times}
        for name, taken in times.items():
            say(f"  {name:20} {spread(taken):30} {1e6 * busy[name]:8.1f} us busy")
            context.record.add(**about, side=name, seconds=taken, busy=busy[name])
        if density == TABLE and not wrong:
            table.setdefault(operation, {})[over] = _best(times, busy)
        _write(context, table)
    return well


def _busy(context, run) -> float:
    """Seconds that the device works for a call: of small arrays most of the time is
    Python's, which launches it.
    """
    if not context.gpu:
        return 0.0
    return sum(seconds for _, _, seconds in profile.kernels(run))


def _best(times, busy) -> str:
    """Triton where it takes a tenth less time than plain XLA, which runs everywhere.

    By the clock, since a launch of Triton's takes the host longer than one of XLA's, and by
    how long the device is busy, since what else the host did is not the kernel's. Pallas'
    Triton backend is deprecated, and is asked for by its name.
    """
    clock = {name: statistics.median(taken) for name, taken in times.items()}
    is_less = lambda by: by.get("triton", math.inf) <= 0.9 * by["reference"]
    return "triton" if is_less(clock) and is_less(busy) else "reference"


def _timed(context, operation, sides):
    """Seconds of the sides that run and agree with the reference, and what is wrong."""
    right, wrong, expected = {}, {}, None
    for name, run in sides.items():
        try:
            result = jax.block_until_ready(run())
        except kernels.BackendError:
            continue  # This operation has no such kernel.
        except Exception as error:
            wrong[name] = f"{type(error).__name__}: {str(error)[:300]}"
            continue
        if name in backends.BACKENDS:
            summary = _summary(operation, result)
            expected = summary if expected is None else expected
            if summary != expected:
                wrong[name] = f"{summary} where the reference has {expected}"
                continue
        right[name] = run
    return alternate(right, context.repeats, context.sample), wrong


def _summary(operation, result):
    """Sums modulo 2^32 that all backends must agree on, in whatever order threads ran."""
    if operation in ("partition", "partition_dense"):
        there = result.memory >= 0
        kept = jnp.where(there, result.memory, 0)
        # Where there is room for all, as here; else who is left depends on the threads.
        return [_total(kept), _total(kept * kept), _total(there), _total(result.left)]
    if operation == "threshold_hash":
        return [_total(result >= 0)]
    leaves = [jnp.ravel(leaf) for leaf in jax.tree.leaves(result)]
    weights = [jnp.arange(1, leaf.size + 1, dtype=jnp.uint32) for leaf in leaves]
    return [
        _total(leaf.astype(jnp.uint32) * weight)
        for leaf, weight in zip(leaves, weights, strict=True)
    ]


def _total(x):
    return int(jnp.sum(x.astype(jnp.uint32), dtype=jnp.uint32))


def _write(context, table):
    rows = {
        operation: [{"size": size, "backend": best[size]} for size in sorted(best)]
        for operation, best in table.items()
    }
    kind = jax.devices()[0].device_kind
    (context.out / "winners.json").write_text(json.dumps({kind: rows}, indent=2) + "\n")


def _sides(context, size, density):
    """For each operation the size of its operand, and by name functions and operands."""
    host = operations.gradient(density, size)
    x = jnp.asarray(host)
    indices = jnp.asarray(np.flatnonzero(host), jnp.int32)
    count = indices.size
    capacity = int(1.1 * count)
    words = kernels.bitmap_encode(x, backend="reference")
    seeds = jnp.asarray(kernels.draw_seeds(4))
    slots = 2 * count // PARTS
    of = functools.partial
    memory = kernels.HashMemory(PARTS, slots, max(1, slots // 10))
    # Numbers of which so many are above a threshold.
    normal = jax.random.normal(jax.random.key(0), (size,))
    level = float(jax.scipy.stats.norm.ppf(1 - density / 2))
    calls = {
        "compact": (of(kernels.compact, capacity=capacity), (x,)),
        "partition_dense": (of(kernels.partition_dense, memory=memory), (x, seeds)),
        "bitmap_encode": (kernels.bitmap_encode, (x,)),
        "bitmap_decode": (of(kernels.bitmap_decode, capacity=capacity), (words,)),
        "partition": (
            of(kernels.partition, memory=memory),
            (indices, jnp.int32(count), seeds),
        ),
        "threshold_hash": (
            of(kernels.threshold_hash, threshold=level, seed=7, slots=2 * count),
            (normal,),
        ),
    }
    sizes, messages = _messages(x, count)
    calls |= messages
    by_operation = {
        operation: (
            # What `backends.run` takes for the size.
            sizes.get(operation, operands[0].size),
            {n: (of(function, backend=n), *operands) for n in context.backends},
        )
        for operation, (function, operands) in calls.items()
    }
    append = kernels.HashMemory(PARTS, slots=0, hashes=0, serial=slots)
    append = of(kernels.partition, memory=append)
    by_operation["partition"][1].update(
        {
            f"append, {n}": (of(append, backend=n), *calls["partition"][1])
            for n in context.backends
        }
    )
    by_operation["compact"][1].update({"copy": (lambda x: x + 1, x), "read": (jnp.sum, x)})
    by_operation["threshold_hash"][1].update(_selections(normal, density))
    if size <= MEDIUM:
        nonzero = of(jnp.nonzero, size=capacity, fill_value=size)
        by_operation["compact"][1]["jnp.nonzero"] = (nonzero, x)
    return by_operation


def _messages(x, count):
    """By operation what is gone over in messages to all owners, and the calls.

    The numbers are ones, so that any order adds them up exactly.
    """
    units = striping.Striping(x.size, PARTS, 0)
    width = striping.width(x.size, PARTS)
    sets = Slots.of(striping.split(rank_select.nonzero(x), PARTS, 0))
    room = 4 * -(-int(1.1 * count) // (4 * PARTS)) + 64
    rung = ladder.Rung.of(room, width, 4, [index_codes.COO8])
    steps = ladder.Ladder(width, 4, 1 << 13, (rung,), at_once=True)
    form = formats.Form(steps, (), jnp.dtype(jnp.float32), PARTS)
    numbers = jnp.concatenate([jnp.array([0, room], jnp.int32), form.places(0)])
    over = {"pack_message": PARTS * room, "unpack_message": PARTS * room}
    over["index_message"] = PARTS * form.longest
    # What lies after a message may be anything.
    sent = dataclasses.replace(form.spec, units=units, end=rung.words)

    def pack(slots, counts, array, numbers, **how):
        packed = kernels.SlotSets(slots, counts)
        return kernels.pack_message(packed, array, numbers, sent, **how)

    def unpack(into, message, numbers, **how):
        received = kernels.Received(message)
        return kernels.unpack_message(into, received, numbers, form.spec, **how)

    message = pack(*sets, x, numbers, backend="reference")
    index = functools.partial(kernels.index_message, spec=form.spec)
    return over, {
        "pack_message": (pack, (*sets, x, numbers)),
        "index_message": (index, (message, numbers)),
        "unpack_message": (unpack, (jnp.zeros(width), message, numbers)),
    }


def _selections(x, density):
    """The rivals of DRAGONN's hash: DGC and exact top-k, this library's and others'."""

    def ours(sparsifier):
        drawn, capacity = published.draw(x.size, density), sparsifier.capacity(x.size)
        state = sparsifier.init(x.size, x.dtype)
        return lambda x: sparsifier.select(x, state, drawn, capacity)[0]

    sides = {
        "dgc": (ours(sparsifiers.DGC(density)), x),
        "top_k": (ours(sparsifiers.TopK(density)), x),
    }
    if x.size <= MEDIUM:
        sides["dgc by nonzero"] = (lambda x: published.published_dgc(x, density)[0], x)
        sides["lax.top_k"] = (lambda x: published.published_top_k(x, density)[0], x)
    return sides


def _targets(context) -> None:
    """The fastest backend of an operation over something else, and what to reach."""
    rows = [row for row in context.record.rows if "seconds" in row and "size" in row]

    def median(operation, sides, size):
        medians = [
            statistics.median(row["seconds"])
            for row in rows
            if row["part"] == operation
            and row["side"] in sides
            and (row["size"], row["density"]) == (size, TARGETS)
        ]
        return min(medians, default=float("nan"))

    ours, large, medium = backends.BACKENDS, context.sizes[0], context.sizes[1]
    read, copy = (median("compact", [side], large) for side in ("read", "copy"))
    say(f"\nread at {4e-12 * large / read:.2f} TB/s, copied at {8e-12 * large / copy:.2f}")
    aims = [
        (operation, ours, "compact", "read", large, 1.43)
        for operation in ("compact", "partition_dense")
    ]
    aims += [
        ("compact", ours, "compact", "jnp.nonzero", medium, 1 / 5),
        ("partition", ours[1:], "partition", "reference", large, 1),
    ]
    aims += [
        ("threshold_hash", ours, "threshold_hash", side, medium, 0.3)
        for side in ("lax.top_k", "dgc by nonzero", "top_k", "dgc")
    ]
    for operation, sides, other, side, size, aim in aims:
        ratio = median(operation, sides, size) / median(other, [side], size)
        name = f"{operation} over {side}, {size:,} elements"
        if math.isnan(ratio):
            say(f"{name}: not measured")
            continue
        say(f"{name}: {ratio:.3g} (to reach: at most {aim:.3g})")
        context.record.add(part="targets", name=name, ratio=ratio, aim=aim)
