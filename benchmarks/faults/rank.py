"""One host of `benchmarks.faults`: it trains, and something befalls it."""

import hashlib
import os
import pathlib
import random
import threading
import time

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

import sparsejax
from benchmarks.faults.books import books
from benchmarks.faults.kinds import FAULTS
from benchmarks.faults.settings import AXIS, Settings
from benchmarks.faults.systems import Training
from benchmarks.testbed import host


def mesh_of_hosts() -> Mesh:
    """All processes, one device each, along one axis."""
    return Mesh(np.array(jax.devices()), (AXIS,), axis_types=(AxisType.Auto,))


def digest(params) -> str:
    """A hash of the parameters that are the same on all hosts."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        if leaf.is_fully_replicated:
            found.update(np.asarray(leaf.addressable_data(0)))
    return found.hexdigest()


def checkpoints(folder: pathlib.Path) -> list[pathlib.Path]:
    """Those that are there, the oldest first."""
    found = [path for path in folder.glob("step-*") if path.name[5:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[5:]))


class Injection:
    """Lets the fault of a case befall this host in its step, if it is the one."""

    def __init__(self, settings: Settings, here: host.Here):
        self._settings, self._here = settings, here
        self._mine = settings.befalls and here.rank == settings.lost
        self._random = random.Random(settings.seed)
        self.step_seconds = 0.03  # of the last step

    def at(self, step: int, saves: bool = False) -> bool:
        """Called before each step, and before it is saved.

        Returns:
            Whether this host is to leave its block there.
        """
        is_due = saves == (self._settings.moment == "save")
        if not self._mine or step != self._settings.at or not is_due:
            return False
        if FAULTS[self._settings.fault].between:
            return bool(self._befall())
        later = self._random.uniform(0, 0.3 if saves else self.step_seconds)
        threading.Timer(later, self._befall).start()
        return False

    def _befall(self):
        fault = FAULTS[self._settings.fault]
        if fault.ends:  # and this process may be with it
            self._here.report(befallen=time.time())
        leaves = fault.inject(self._here, fault.seconds(self._settings.silence))
        if not fault.ends:
            self._here.report(befallen=time.time())
        return leaves


def rank(settings: Settings) -> None:
    """Trains on this host, until something ends the job or all steps are done."""
    here = host.Here.from_environment()
    folder = pathlib.Path(settings.folder)
    log = folder / f"{settings.phase}-{here.rank}.txt"
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(here.coordinator, here.ranks, here.rank)
    with sparsejax.advise.watch_job(timeout=settings.silence):
        train(settings, here, folder)
    jax.distributed.shutdown()


def train(settings: Settings, here: host.Here, folder: pathlib.Path) -> None:
    """Restores the last checkpoint, if any, and trains."""
    training = Training(settings.scheme, mesh_of_hosts(), settings.seed)
    state, kept = training.first(), checkpoints(folder)
    account = books(settings, training)
    if kept:
        state = sparsejax.restore(kept[-1], like=state)
        is_at = {"restored": int(state.step), "digest": digest(state.params)}
        here.report(**is_at, lost=account.lost(state))
    fault = Injection(settings, here)
    for step in range(int(state.step), settings.steps):
        batches = training.batches(step)
        if fault.at(step):
            return
        begin = time.perf_counter()
        state = training.step(state, batches)
        jax.block_until_ready(state)
        fault.step_seconds = time.perf_counter() - begin
        if settings.is_clean:
            here.report(clean=step + 1, digest=digest(state.params))
        elif (step + 1) % settings.every == 0:
            if fault.at(step, saves=True):
                return
            sparsejax.save(folder / f"step-{step + 1}", state)
    here.report(trained=time.time())
    lost = account.lost(state)
    here.report(done=int(state.step), lost=lost, digest=digest(state.params))
