"""Holds the turns that a count assumes against a run of the same load on CPU devices.

They run the program that is traced for GPUs; where kernels unpack messages piece by piece
in it, the reference does here, piece by piece as well. Every loop whose length is data
counts its turns while the step runs. A loop that takes others than it is said to, one that
nothing is said of, rounds (each piece is one) or bytes that differ from the library's own:
each is an error, since the count would be of another program.
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


# Counts of bytes are of float32.
_CLOSE = 1e-3


@contextlib.contextmanager
def counting():
    """While a step is traced, makes loops count; what they counted comes when it has run.

    Returns lists of turns by place, one for each time that a loop ended on a device.
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
    """Runs a load, and raises where it does other than `turns` says.

    Args:
        scheme: By its name.
        load: Small enough for the CPU devices.
        mesh: Those devices.
        counted: The same load's program for a GPU.

    Returns:
        The turns of each loop on all devices, the rounds and the bytes of the run.
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
        # What counts must not be found by others.
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
    """Raises unless a run took the rounds that are reckoned, and sent the bytes counted.

    Args:
        scheme: By its name.
        units: Of the load.
        known: The rounds of each stage.
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
    """The turns that loops took on all devices; raises unless they are those reckoned.

    Args:
        scheme: By its name.
        known: The turns that are reckoned.
        found: Those that were counted, by place.
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
    """Each rank's gradient on its device: numbers where its set has units."""
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
