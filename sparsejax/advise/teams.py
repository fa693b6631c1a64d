"""Measures the time of a synchronization with each number of SparDL's teams.

On the wire: the messages of `spardl_sync` with each number of teams in turn, a few times,
and at the end one number for each, the maximum over all devices.
"""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from sparsejax import arguments
from sparsejax.axes import AxisName
from sparsejax.errors import ArgumentError
from sparsejax.placement import initial, specs
from sparsejax.state.per_rank import find
from sparsejax.transforms.feedback import FeedbackState
from sparsejax.transforms.systems import spardl_sync
from sparsejax.wire.collectives import Wire


def measure_teams(
    params: Any,
    density: float,
    mesh: Mesh,
    axis_name: AxisName | None = None,
    *,
    steps: int = 5,
    **options: Any,
) -> dict[int, float]:
    """Measures `spardl_sync` with every number of teams that divides the ranks.

    It compiles each of them, and times `steps` synchronizations of each. In a job of
    several processes all call it.

    Args:
        params: The parameters, or anything with their shapes and dtypes.
        density: The share of elements that are sent.
        mesh: The mesh.
        axis_name: The mesh axis of the ranks, where the mesh has several axes.
        steps: The number of synchronizations that are timed for each number of teams.
        **options: The arguments `between`, `code` and `rules` of `spardl_sync`.

    Returns:
        The median seconds of a synchronization on the slowest process, by the number of
        teams.

    Example:
        >>> times = sparsejax.advise.measure_teams(params, 0.01, mesh)
        >>> tx = sparsejax.spardl_sync(0.01, teams=min(times, key=times.get))
    """
    arguments.check_whole("steps", steps, 1)
    if "teams" in options:
        raise ArgumentError("teams is what is measured: leave it out.")
    axis_name = specs.data_axis(mesh, axis_name, "sparsejax.advise.measure_teams")
    ranks = specs.ranks_of(mesh, axis_name)
    swaps = options.get("between") == "swaps"
    divisors = [d for d in range(1, ranks + 1) if ranks % d == 0]
    divisors = [d for d in divisors if not swaps or d & (d - 1) == 0]
    runs = {d: _TimedRun(params, density, mesh, axis_name, d, options) for d in divisors}
    times: dict[int, list[float]] = {d: [] for d in divisors}
    for _ in range(steps):
        for teams, run in runs.items():
            start = time.perf_counter()
            run()
            times[teams].append(time.perf_counter() - start)
    return {d: _agreed(float(np.median(seconds)), mesh) for d, seconds in times.items()}


class _TimedRun:
    """A compiled synchronization of random gradients."""

    def __init__(self, params, density, mesh, axis_name, teams, options):
        tx = spardl_sync(density, axis_name, teams=teams, **options)
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), params)
        self._state = initial.init(tx, zeros, mesh, axis_name)
        state_specs = specs.state_specs(self._state)
        if not any(s.residual is not None for s in find(self._state, FeedbackState)):
            raise ArgumentError(
                "no parameter is large enough for SparDL, so nothing would be measured. "
                "Give those that are to use it as rules={path: 'sparse'}."
            )

        def draw(leaf, number):
            key = jax.random.fold_in(jax.random.key(number), Wire(axis_name).rank)
            # Cubed, so that some are much larger than others.
            return (jax.random.normal(key, leaf.shape) ** 3).astype(leaf.dtype)

        def step(state):
            leaves, structure = jax.tree.flatten(zeros)
            drawn = [draw(leaf, i) for i, leaf in enumerate(leaves)]
            updates, state = tx.update(structure.unflatten(drawn), state)
            sums = [jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(updates)]
            return state, sum(sums, jnp.float32(0))

        mapped = jax.shard_map(
            step, mesh=mesh, in_specs=(state_specs,), out_specs=(state_specs, P())
        )
        self._step = jax.jit(mapped, donate_argnums=0)
        self()

    def __call__(self):
        self._state, done = self._step(self._state)
        jax.block_until_ready(done)


def _agreed(seconds, mesh):
    """Returns the seconds of the slowest process, on all processes."""
    by_device = NamedSharding(mesh, P(mesh.axis_names))
    piece = np.full(1, seconds, np.float32)
    pieces = jax.make_array_from_callback((mesh.size,), by_device, lambda _: piece)
    slowest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, P()))
    return float(slowest(pieces))
