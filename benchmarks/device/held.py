"""Compares the iterations that a count assumes with a run of the same load on CPU devices.

The CPU devices run the program that is traced for GPUs; where GPU kernels unpack messages
piece by piece, the reference does here, by the same pieces. Every loop whose length is data
counts its iterations while the step runs. Each of these is an error, because the count
would be that of another program: a loop with other iterations than assumed, a loop about
which nothing is known, and rounds (each piece is one) or bytes that differ from those which
the library reports.
"""

import collections
import contextlib
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import pallas_kernels
import sparsejax
from benchmarks.device import compiled, turns
from benchmarks.device.hlo import ProgramError
from benchmarks.device.loads import RANKS, Load
from benchmarks.device.stage import Stage
from pallas_kernels import platforms
from sparsejax.units.row_grads import RowGrads


# Relative: the library counts bytes in float32.
_CLOSE = 1e-3


@contextlib.contextmanager
def counting():
    """Makes the loops of steps that are traced inside count their iterations.

    Yields a dict from the place of a loop to a list, to which the run of a step appends
    the number of iterations whenever the loop ends on a device.
    """
    found: dict[turns.Place, list[int]] = collections.defaultdict(list)
    original = lax.while_loop

    def while_loop(condition, body, start):
        place = turns.here()
        found[place] = []

        def turn(state):
            number, state = state
            return number + 1, body(state)

        first = (jnp.int32(0), start)
        number, result = original(lambda state: condition(state[1]), turn, first)
        jax.debug.callback(lambda number: found[place].append(int(number)), number)
        return result

    with mock.patch.object(lax, "while_loop", while_loop):
        yield found


def hold(scheme: str, load: Load, mesh: Mesh, counted: compiled.Counted) -> dict:
    """Runs a load on CPU devices, and raises if it differs from what `turns` assumes.

    Args:
        scheme: The name of the scheme.
        load: A load that is small enough for the CPU devices.
        mesh: The CPU devices.
        counted: The counts of the same load's program for a GPU.

    Returns:
        The iterations of each loop on all devices, the rounds and the bytes of the run.
    """
    one = compiled.step(scheme, load, mesh)
    like = {load.leaf: jax.ShapeDtypeStruct(load.shape, jnp.float32)}
    state = sparsejax.init(one.tx, like, mesh)
    x = _gradients(load, mesh)
    jax.clear_caches()
    try:
        for_gpus = mock.patch.object(platforms, "traced_for", return_value="cuda")
        stages = counted.turns.stages.values()
        by_pieces = any(isinstance(one, Stage) and one.pieces for one in stages)
        unpacks = mock.patch.object(
            pallas_kernels, "unpacks_in_kernels", return_value=by_pieces
        )
        with turns.watched(load) as known, jax.set_mesh(mesh), counting() as found:
            with for_gpus, unpacks:
                run = one.run.lower(x, state).compile()
        _, state = run(x, state)
        jax.block_until_ready(state)
        jax.effects_barrier()
    finally:
        # Traces with counting loops must not stay in JAX's caches.
        jax.clear_caches()
    traffic = sparsejax.metrics(state)
    seen = {
        "turns": compare(scheme, known, found, counted.turns.asked),
        "rounds": int(traffic[f"sync/{load.leaf}/rounds"]),
        "sent": float(traffic[f"sync/{load.leaf}/wire_bytes"]),
    }
    agree(scheme, load.units, known, seen, counted.counts.sent)
    return seen


def agree(scheme: str, units: int, known: turns.Turns, seen: dict, sent: float) -> None:
    """Raises unless a run took the assumed rounds, and sent the counted bytes.

    Args:
        scheme: The name of the scheme.
        units: The units of the load.
        known: The stages, with the rounds that they are assumed to take.
        seen: The rounds and the bytes of the run.
        sent: The bytes that the program for a GPU sends.
    """
    said = sum(stage.collectives for stage in known.stages.values())
    if known.stages and seen["rounds"] != said:
        raise ProgramError(
            f"{scheme} took {seen['rounds']} rounds for {units:,} units where "
            f"{said} were reckoned."
        )
    if not np.isclose(seen["sent"], sent, rtol=_CLOSE):
        raise ProgramError(
            f"{scheme} sent {seen['sent']:,.0f} bytes for {units:,} units where the "
            f"program for a GPU sends {sent:,.0f}."
        )


def compare(scheme: str, known: turns.Turns, found: dict, asked: set) -> dict[str, int]:
    """Returns the iterations of loops on all devices; raises unless they are as assumed.

    Args:
        scheme: The name of the scheme.
        known: The iterations that are assumed.
        found: The iterations that were counted, by the place of the loop.
        asked: The names of the loops in the program for a GPU, all of which have to run.
    """
    took: dict[str, int] = {}
    ran = {place: known.name(place) for place in found}
    if never := asked - set(ran.values()):
        raise ProgramError(
            f"{scheme} has a loop for a GPU that CPU devices do not run, so that its turns "
            f"cannot be held: {sorted(never)}. Let CPUs run it, too."
        )
    for place, numbers in found.items():
        name = ran[place]
        stage, functions = name[0], " ".join(f.partition(":")[2] for f in name[1])
        said = int(known.total(name).sum())
        if sum(numbers) != said:
            raise ProgramError(
                f"the loop of {functions} in the {stage} of {scheme} took {sum(numbers)} "
                f"turns on {RANKS} CPU devices where {said} were reckoned: "
                "benchmarks/device/turns.py is wrong about it."
            )
        took[f"{stage} {functions}"] = said
    return took


def _gradients(load: Load, mesh: Mesh) -> Any:
    """Returns each rank's gradient on its device, non-zero at the units of its set."""
    placed = NamedSharding(mesh, P(compiled.AXIS))

    def stacked(like, of):
        make = lambda index: of(index[0].start or 0)[None].astype(like.dtype)
        return jax.make_array_from_callback((RANKS, *like.shape), placed, make)

    def numbers(rank, *shape):
        rng = np.random.default_rng((7, rank))
        return rng.random(shape, np.float32) + 1

    if load.listed:
        ids, like = load.ids(), load.like
        rows = stacked(like.rows, lambda rank: numbers(rank, *like.rows.shape))
        return RowGrads(stacked(like.ids, ids.__getitem__), rows, load.shape)
    sets = load.sets()

    def of(rank):
        x = np.zeros((load.units, load.width), np.float32)
        there = np.flatnonzero(sets[rank])
        x[there] = numbers(rank, len(there), load.width)
        return x.reshape(load.shape)

    return stacked(load.like, of)
