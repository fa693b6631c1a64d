"""One host of `benchmarks.papers.top_k.network`, with all systems that it compares."""

import hashlib

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

import sparsejax
from benchmarks.harness import sides
from benchmarks.network.jax_side import AXIS, JaxSide
from benchmarks.papers.top_k.network import NO_LIMIT, Settings
from benchmarks.papers.top_k.systems import STEPS, gradients, side, transformations
from benchmarks.testbed import host


METRICS = ("density_before", "density_after", "rounds", "push_imbalance")


def residual(side: JaxSide) -> np.ndarray:
    """This rank's residual."""
    if not side.state:
        return np.zeros(side.global_shape[1], np.float32)
    tree = sparsejax.residuals(side.state)
    return np.asarray(tree["w"].addressable_data(0))[0]


def metrics(side: JaxSide) -> dict:
    """Metrics of the last step."""
    if not side.state:
        return {}
    values = sparsejax.metrics(side.state)
    return {key: float(values[f"sync/w/{key}"]) for key in METRICS}


def lost(here: host.Here, side: JaxSide, size: int) -> int:
    """Numbers that were lost; all of them where ranks have other bytes.

    After all gradients their sum must be that of the totals and the residuals.
    """
    applied = np.zeros(size)
    for _ in range(STEPS):
        side.run()
        total = side.total()
        digests = here.gather(hashlib.sha256(total.tobytes()).hexdigest())
        if len(set(digests)) > 1:
            return size
        applied += total
    # Residuals are summed through a file of each rank: no collective is trusted here.
    file_of = lambda rank: here.reports.with_name(f"residual-{rank}.npy")
    np.save(file_of(here.rank), residual(side))
    here.gather(0)
    count = 0
    if here.rank == 0:
        given, scale = np.zeros(size), np.zeros(size)
        for rank in range(here.ranks):
            for x in gradients(size, rank):
                given, scale = given + x, scale + np.abs(x)
            applied += np.load(file_of(rank))
        count = int((~(np.abs(given - applied) <= 1e-6 * scale)).sum())
    return here.gather(count)[0]


def rank(settings: Settings) -> None:
    """Checks and times the systems on this host."""
    with host.join() as here:
        host.share_compiled()
        mesh = Mesh(np.array(jax.devices()), (AXIS,), axis_types=(AxisType.Auto,))
        size = settings.size
        of_rank = gradients(size, here.rank)
        compiled, wrong = [], {}
        for name, tx in transformations(settings.density, here.ranks).items():
            if settings.only and name not in (*settings.only, "psum"):
                continue
            system = side(name, tx, size, mesh)
            system.load(*of_rank)
            wrong[name] = lost(here, system, size)
            seconds = system.compiled
            here.say(f"  {name:16} compiled in {seconds:.1f} s, lost {wrong[name]}")
            if system.state:
                for _ in range(settings.warm):
                    system.run()
            compiled.append(system)
        here.say(f"  {settings.warm} steps each: residuals have grown")
        for rate in (NO_LIMIT, *settings.rates):
            here.set_rate(rate)
            rows = sides.timed(here, compiled, settings.rounds)
            for system, row in zip(compiled, rows, strict=True):
                about = {"workload": "dense", "shape": [size], "wrong": wrong[system.name]}
                here.report(rate=rate, **about, **metrics(system), **row)
            here.say(f"  {rate}: timed")
