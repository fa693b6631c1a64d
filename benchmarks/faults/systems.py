"""What trains in `benchmarks.faults`: parameters from zero, and gradients that are known.

Of another number of ranks each computes something else, as where they share out other data.

`Arrays`: the loss is the product of parameters and a batch, so the gradient is the batch;
with SGD of rate 1, parameters are what was applied, with a minus. `InRounds` is the same by
local steps. `Rows`: the loss reads
rows of a table, by ids of which some repeat and most do not come in a step, and pulls what
it reads towards zero; so a gradient says whether a row was read as it ought to be. Adam
trains them, with a count for each row of the steps that it has missed. With `columns` the
table is EmbRace's: each rank has some columns of it, and rows that the next step does not
read are held back for it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import sparsejax
from benchmarks.faults.settings import AXIS, ROUND


SHAPES: dict[str, tuple[int, ...]] = {"table": (1000, 16), "w": (301,)}
READ = 40  # rows of the table that a rank reads in a step
PULL = 0.1  # towards zero, of a row that is read
MOMENTUM = 0.9
RATE, BETAS, EPSILON = 0.1, (0.9, 0.99), 1e-8  # Adam's
HELD = 16  # rows that a rank can hold back: fewer than there are
RULES = {".*": "sparse"}
Numbers = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Arrays:
    """A system whose gradients are arrays.

    Attributes:
        sync: Makes what stands in front of the optimizer.
        momentum: That of the velocities which ranks accumulate in place of gradients.
        is_rounded: Whether few bits stand for a number that is sent: of zeros, too, so that
            what is held back may be larger than what was computed.
    """

    sync: Callable[[], optax.GradientTransformation]
    momentum: float = 0.0
    is_rounded: bool = False
    is_ahead = False

    def tx(self) -> optax.GradientTransformation:
        """The whole transformation."""
        return optax.chain(self.sync(), optax.sgd(1.0))

    def params(self, mesh: Mesh) -> Any:
        """The first parameters."""
        return {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}

    def share(self, seed: int, step: int, rank: int, ranks: int) -> Numbers:
        """A rank's part of a batch, which is its gradient."""
        rng = np.random.default_rng([seed, step, rank, ranks])
        table = np.zeros(SHAPES["table"], np.float32)
        rows = rng.zipf(1.3, READ) % len(table)
        table[rows] = rng.normal(size=(READ, table.shape[1]))
        return {"table": table, "w": rng.normal(size=SHAPES["w"]).astype(np.float32)}

    def loss(self, params: Any, batch: Any) -> jax.Array:
        """The loss of a rank."""
        return sum(
            (jnp.vdot(x, batch[name][0]) for name, x in params.items()), jnp.zeros(())
        )

    def settled(self, trainer: Any, state: sparsejax.TrainState) -> Any:
        """The parameters with all that was to be applied by now.

        Args:
            trainer: One that does not use up a state.
            state: The state.
        """
        return state.params


@dataclasses.dataclass(frozen=True)
class InRounds(Arrays):
    """Arrays that ranks train by themselves, in rounds of local steps.

    With SGD of rate 1 inside and outside, an anchor is what ranks have moved by then.
    """

    def tx(self) -> optax.GradientTransformation:
        """The whole transformation."""
        return sparsejax.local_steps(
            optax.sgd(1.0), every=ROUND, outer=optax.sgd(1.0), sync=self.sync()
        )


@dataclasses.dataclass(frozen=True)
class Rows:
    """A system that trains a table by the rows that are read.

    Attributes:
        sync: Makes what stands in front of the optimizer.
        columns: Whether ranks share the table out by columns, and know the next batch.
    """

    sync: Callable[[], optax.GradientTransformation]
    columns: bool = False

    @property
    def is_ahead(self) -> bool:
        """Whether a step is given the next batch."""
        return self.columns

    def tx(self) -> optax.GradientTransformation:
        """The whole transformation."""
        return optax.chain(self.sync(), ADAM)

    def params(self, mesh: Mesh) -> Any:
        """The first parameters."""
        params = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        if not self.columns:
            return params
        return params | {"table": sparsejax.ColumnTable.of(params["table"], mesh)}

    def share(self, seed: int, step: int, rank: int, ranks: int) -> Numbers:
        """A rank's part of a batch: the ids that it reads, and what it makes of them."""
        rng = np.random.default_rng([seed, step, rank, ranks])
        height, dim = SHAPES["table"]
        return {
            "ids": (rng.zipf(1.3, READ) % height).astype(np.int32),
            "table": rng.normal(size=(READ, dim)).astype(np.float32),
            "w": rng.normal(size=SHAPES["w"]).astype(np.float32),
        }

    def loss(self, params: Any, batch: Any) -> jax.Array:
        """The loss of a rank."""
        read = sparsejax.column_lookup if self.columns else sparsejax.lookup
        rows = read(params["table"], batch["ids"][0])
        pull = PULL / 2 * jnp.vdot(rows, rows)
        return (
            jnp.vdot(params["w"], batch["w"][0]) + jnp.vdot(rows, batch["table"][0]) + pull
        )

    def gradient(self, share: Numbers, params: Numbers) -> Numbers:
        """The gradient of that loss, in float64.

        Args:
            share: Of a rank.
            params: The parameters, in float64.
        """
        table = np.zeros(SHAPES["table"])
        np.add.at(
            table, share["ids"], share["table"] + PULL * params["table"][share["ids"]]
        )
        return {"table": table, "w": share["w"].astype(np.float64)}

    def settled(self, trainer: Any, state: sparsejax.TrainState) -> Any:
        """The parameters with all that was to be applied by now.

        Args:
            trainer: One that does not use up a state.
            state: The state.
        """
        if not self.columns:
            settle = jax.jit(sparsejax.rows.settle, static_argnums=2)
            return settle(state.params, state.opt_state, ADAM)[0]
        params = trainer.flush(state).params
        return params | {"table": params["table"].whole()}


def _chosen(make):
    """A system that selects, of each array."""
    return Arrays(lambda: make(0.05, rules=RULES))


def _sparsified(sparsifier, momentum=0.0, **options):
    """A system that sends by Zen what a sparsifier selects."""
    made = sparsejax.sparsify(sparsifier(0.05), min_size=0, **options)
    return Arrays(lambda: optax.chain(made, sparsejax.zen_sync()), momentum)


# With masking, what is left of a velocity would depend on what each rank has sent of it.
_MEMORY = sparsejax.MomentumCorrection(MOMENTUM, masking=False)
ADAM = sparsejax.lazy(optax.adam(RATE, *BETAS, eps=EPSILON))
SYSTEMS: dict[str, Arrays | Rows] = {
    "dense": Arrays(sparsejax.dense_sync),
    "zen": Arrays(sparsejax.zen_sync),
    "dgc": _sparsified(sparsejax.sparsifiers.DGC),
    "dragonn": _sparsified(sparsejax.sparsifiers.Dragonn),
    "ok_topk": _chosen(sparsejax.ok_topk_sync),
    "spardl": _chosen(sparsejax.spardl_sync),
    "gtopk": _chosen(sparsejax.transforms.gtopk_sync),
    "momentum": _sparsified(sparsejax.sparsifiers.DGC, MOMENTUM, memory=_MEMORY),
    "rows": Rows(lambda: sparsejax.zen_sync(rules={"table": "sparse"})),
    "embrace": Rows(lambda: sparsejax.embrace_sync(delayed=HELD), columns=True),
    "diloco": InRounds(sparsejax.dense_sync),
    # Divided by the ranks, and with nothing forgotten: else there is no sum to hold it to.
    "sparse_loco": InRounds(lambda: sparsejax.chunked_sync(over="ranks"), is_rounded=True),
}


class Training:
    """A system on the ranks of a mesh: its first state, its steps, its parameters.

    Attributes:
        system: One of `SYSTEMS`.
        mesh: The mesh.
    """

    def __init__(self, scheme: str, mesh: Mesh, seed: int, **options):
        """Nothing is trained yet.

        Args:
            scheme: The name of the system.
            mesh: Of all processes.
            seed: Of gradients.
            options: Of `sparsejax.data_parallel`.
        """
        self.system, self.mesh, self._seed = SYSTEMS[scheme], mesh, seed
        of = self.system.loss, self.system.tx(), mesh
        self._trainer = sparsejax.data_parallel(*of, **options)
        self._reader = sparsejax.data_parallel(*of, donate=False)
        everywhere = NamedSharding(mesh, P())
        self._whole = jax.jit(lambda tree: tree, out_shardings=everywhere)
        self._mean = jax.jit(
            lambda tree: jax.tree.map(lambda x: x.mean(0), tree), out_shardings=everywhere
        )

    def first(self) -> sparsejax.TrainState:
        """The state from zero."""
        return self._trainer.init(self.system.params(self.mesh))

    def step(self, state: sparsejax.TrainState, batches: list[Any]) -> sparsejax.TrainState:
        """The state after a step; the one that is given is used up.

        Args:
            state: The state.
            batches: What `batches` returns.
        """
        return self._trainer.step(state, *batches)[0]

    def batches(self, step: int) -> list[dict[str, jax.Array]]:
        """The batch of a step, and the next one where it is to be known."""
        return [self._batch(step + ahead) for ahead in range(1 + self.system.is_ahead)]

    def _batch(self, step):
        here, devices = jax.process_index(), self.mesh.devices.flat
        own = [at for at, device in enumerate(devices) if device.process_index == here]
        share = self.system.share
        shares = [share(self._seed, step, rank, len(devices)) for rank in own]
        sharding = NamedSharding(self.mesh, P(AXIS))
        return {
            name: jax.make_array_from_process_local_data(
                sharding, np.stack([share[name] for share in shares])
            )
            for name in shares[0]
        }

    def settled(self, state: sparsejax.TrainState) -> Numbers:
        """The parameters with all that was to be applied by now, in float64."""
        return _numbers(self._whole(self.system.settled(self._reader, state)))

    def mean(self, held: Any) -> Numbers:
        """The mean over ranks of what they hold, {name: [ranks, ...]}, in float64."""
        return _numbers(self._mean(held))


def _numbers(tree):
    return {name: np.asarray(x.addressable_data(0), np.float64) for name, x in tree.items()}
