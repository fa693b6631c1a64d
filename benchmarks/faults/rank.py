"""One host of `benchmarks.faults`: it trains, and something befalls it.

The loss is the product of parameters and a batch, so the gradient is the batch; with SGD of
rate 1 from zero, parameters are what was applied, with a minus.
"""

import hashlib
import os
import pathlib
import random
import signal
import subprocess
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import sparsejax
from benchmarks.faults.settings import AXIS, FAULTS, Settings
from benchmarks.testbed import host, network
from sparsejax.training import DataParallel


SHAPES = {"table": (1000, 16), "w": (301,)}
READ = 40  # rows of the table that a rank reads in a step
RULES = {".*": "sparse"}


def chosen(make):
    """The transformation of a system that selects, of each array."""
    return lambda: make(0.05, rules=RULES)


SCHEMES = {
    "dense": sparsejax.dense_sync,
    "zen": sparsejax.zen_sync,
    "dgc": lambda: optax.chain(sparsejax.dgc(0.05, min_size=0), sparsejax.zen_sync()),
    "dragonn": lambda: optax.chain(
        sparsejax.dragonn(0.05, min_size=0), sparsejax.zen_sync()
    ),
    "ok_topk": chosen(sparsejax.ok_topk_sync),
    "spardl": chosen(sparsejax.spardl_sync),
    "gtopk": chosen(sparsejax.transforms.gtopk_sync),
}


def gradient(seed: int, step: int, rank: int) -> dict[str, np.ndarray]:
    """What a rank computes in a step."""
    rng = np.random.default_rng([seed, step, rank])
    table = np.zeros(SHAPES["table"], np.float32)
    rows = rng.zipf(1.3, READ) % len(table)
    table[rows] = rng.normal(size=(READ, table.shape[1]))
    return {"table": table, "w": rng.normal(size=SHAPES["w"]).astype(np.float32)}


def loss_fn(params, batch):
    return sum(jnp.vdot(params[name], batch[name][0]) for name in params)


def mesh_of_hosts() -> Mesh:
    """All processes, one device each, along one axis."""
    return Mesh(np.array(jax.devices()), (AXIS,), axis_types=(AxisType.Auto,))


def begun(scheme: str, mesh: Mesh, **options) -> tuple[DataParallel, sparsejax.TrainState]:
    """A trainer over all processes, and its state from zero.

    Args:
        scheme: Which of `SCHEMES`.
        mesh: Of all processes.
        options: Of `sparsejax.data_parallel`.
    """
    tx = optax.chain(SCHEMES[scheme](), optax.sgd(1.0))
    trainer = sparsejax.data_parallel(loss_fn, tx, mesh, **options)
    zeros = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    return trainer, trainer.init(zeros)


def batch_of(seed: int, step: int, rank: int, mesh: Mesh) -> dict[str, jax.Array]:
    """The batch of a step: what this host's rank computes is its part."""
    sharding = NamedSharding(mesh, P(AXIS))
    return {
        name: jax.make_array_from_process_local_data(sharding, x[None])
        for name, x in gradient(seed, step, rank).items()
    }


class Books:
    """What was computed, beside what was applied and what is held back."""

    def __init__(self, settings: Settings):
        self._settings = settings
        self._mean = jax.jit(lambda held: jax.tree.map(lambda x: x.mean(0), held))

    def lost(self, state: sparsejax.TrainState) -> float:
        """The largest difference of both, over the sum of sizes of what was computed."""
        held = self._held(state)
        worst = 0.0
        for name, shape in SHAPES.items():
            given, scale = np.zeros(shape), np.zeros(shape)
            for x in self._computed(int(state.step), name):
                given, scale = given + x, scale + np.abs(x)
            applied = -np.asarray(state.params[name].addressable_data(0), np.float64)
            off = np.abs(given - applied - held[name])
            worst = max(worst, float((off / np.maximum(scale, 1e-3)).max()))
        return worst

    def _computed(self, steps, name):
        """Each rank's share of a mean, of all steps."""
        for step in range(steps):
            ranks = self._settings.ranks_at(step)
            for rank in range(ranks):
                x = gradient(self._settings.seed, step, rank)[name]
                yield x.astype(np.float64) / ranks

    def _held(self, state):
        """The mean of what ranks hold back."""
        try:
            residuals = sparsejax.residuals(state.opt_state)
        except sparsejax.errors.StateError:
            residuals = {}  # all is sent
        held = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        there = {
            name: x for name, x in residuals.items() if not isinstance(x, optax.MaskedNode)
        }
        for name, x in self._mean(there).items():
            held[name] = np.asarray(x.addressable_data(0), np.float64)
        return held


def digest(params) -> str:
    """A hash of the parameters on this host."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        found.update(np.asarray(leaf.addressable_data(0)))
    return found.hexdigest()


def checkpoints(folder: pathlib.Path) -> list[pathlib.Path]:
    """Those that are there, the oldest first."""
    found = [path for path in folder.glob("step-*") if path.name[5:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def befall(settings: Settings, here: host.Here) -> None:
    """Does to this host what the case asks for."""
    here.report(befallen=time.time())
    fault = FAULTS[settings.fault]
    if fault.name == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.name in ("stop", "pause"):
        seconds = fault.seconds(settings.silence)
        again = f"sleep {seconds}; kill -CONT {os.getpid()}"
        quiet = subprocess.DEVNULL  # else whoever reads this host's output waits for it
        subprocess.Popen(["sh", "-c", again], start_new_session=True, stdout=quiet)
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault.name == "cut" and here.namespace:
        network.run("ip", "link", "set", "eth0", "down", namespace=here.namespace)
    if fault.name == "rate" and here.namespace and here.switch and here.rate:
        half = f"{network.bits_per_second(here.rate) / 2:.0f}bit"
        network.limit(here.namespace, "eth0", half)
        network.limit(here.switch, f"port{here.rank}", half)


class Fault:
    """Befalls this host in a step, or does nothing."""

    def __init__(self, settings: Settings, here: host.Here):
        self._settings, self._here = settings, here
        self._mine = settings.befalls and here.rank == settings.lost
        self._random = random.Random(settings.seed)

    def at(self, step: int) -> None:
        """Called before each step."""
        if not self._mine or step != self._settings.at:
            return
        if self._settings.fault == "memory":
            self._here.report(befallen=time.time())
            np.ones(1 << 50)  # More than there can be; NumPy raises MemoryError.
        later = self._random.uniform(0, 0.03)
        threading.Timer(later, befall, (self._settings, self._here)).start()


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
    mesh = mesh_of_hosts()
    trainer, state = begun(settings.scheme, mesh)
    books, kept = Books(settings), checkpoints(folder)
    if kept:
        state = sparsejax.restore(kept[-1], like=state)
        here.report(restored=int(state.step), lost=books.lost(state))
    fault = Fault(settings, here)
    for step in range(int(state.step), settings.steps):
        batch = batch_of(settings.seed, step, here.rank, mesh)
        fault.at(step)
        state, _ = trainer.step(state, batch)
        jax.block_until_ready(state)
        if (step + 1) % settings.every == 0:
            sparsejax.save(folder / f"step-{step + 1}", state)
    here.report(done=int(state.step), lost=books.lost(state), digest=digest(state.params))
