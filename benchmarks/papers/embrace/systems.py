"""EmbRace and the systems that it is compared with: a row of a table each.

A system says how tables are held, how gradients are averaged, who takes the step, and,
where it is scheduled, by which trainer and on which batches. All train the same task from
the same numbers. `SYSTEMS` is where another is added: one that wants to know the next batch
gives what wraps the batches as `feed`, one with a step of its own a `trainer`, one that
delays what it sends a `flush`.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import sparsejax
from benchmarks.papers.embrace.tasks import Task
from benchmarks.papers.embrace.unchecked import Unchecked
from sparsejax import rows, schemes
from sparsejax.embrace import ColumnTable, column_lookup


AXIS = "data"
# The rest of a model is summed densely by all of them.
TABLES_ALONE = {"tables/": "sparse", "": "dense"}
OPTIMIZERS = {
    "adam": lambda rate: optax.adam(rate),
    "adagrad": lambda rate: optax.adagrad(20 * rate),
    "sgd": lambda rate: optax.sgd(100 * rate, momentum=0.9),
}


@dataclasses.dataclass(frozen=True)
class System:
    """One way to train.

    Attributes:
        sync: Makes the synchronization.
        way: Its row of `sparsejax.advise.papers.embrace.WAYS`.
        by_rows: Whether gradients of tables are rows, and a lazy optimizer applies them.
        columns: Whether tables are sharded by columns.
        trainer: Makes the trainer, as `sparsejax.data_parallel` does.
        feed: From the batches to what its step is given.
        flush: From its trainer and a state to one in which nothing is delayed.
    """

    sync: Callable[[], optax.GradientTransformation]
    way: str
    by_rows: bool = True
    columns: bool = False
    trainer: Callable[..., Any] = sparsejax.data_parallel
    feed: Callable[[Iterator[Any]], Iterator[Any]] = iter
    flush: Callable[[Any, Any], Any] = lambda trainer, state: state

    @property
    def alike(self) -> str:
        """What it is where a rank is alone: such systems have one and the same step."""
        return "columns" if self.columns else "rows" if self.by_rows else "dense"


def _by(scheme: schemes.Scheme) -> Callable[[], optax.GradientTransformation]:
    return lambda: sparsejax.sync(scheme, rules=TABLES_ALONE, axis_name=AXIS)


def _densely():
    return sparsejax.dense_sync(axis_name=AXIS)


def _zen():
    return sparsejax.zen_sync(rules=TABLES_ALONE, axis_name=AXIS)


SYSTEMS = {
    "all-reduce": System(_densely, "all-reduce", by_rows=False),
    "all-gather": System(_by(schemes.AGSparse()), "all-gather"),
    "parallax": System(_by(schemes.SparsePS()), "parallax"),
    "zen rows": System(_zen, "zen rows"),
    "hybrid": System(_densely, "hybrid", columns=True),
}
BASELINES = ("all-reduce", "all-gather", "parallax")


class Training:
    """A task trained by one system.

    Attributes:
        state: The trainer's.
    """

    def __init__(
        self,
        system: System,
        task: Task,
        mesh: Mesh,
        optimizer: optax.GradientTransformation,
        *,
        exact: bool,
        rooms: dict[str, int] | None = None,
        check: bool = True,
    ):
        """Makes the trainer and the first state.

        Args:
            system: The system.
            task: What is trained.
            mesh: Of the ranks, along its axis `AXIS`.
            optimizer: Of all parameters.
            exact: Whether rows that are not read move as a dense optimizer moves them.
            rooms: Distinct rows of each table that a rank reads as a rule, for columns.
            check: Whether by the system's trainer; else in a `shard_map` of one's own that
                does not check.
        """
        self.system = system
        self._rows = optimizer
        if system.by_rows:
            self._rows = sparsejax.lazy(optimizer, exact=exact)
        tx = optax.chain(system.sync(), self._rows)
        loss = loss_of(task, rooms)
        self._trainer = (system.trainer if check else Unchecked)(
            loss, tx, mesh, axis_name=AXIS
        )
        if isinstance(self._trainer, Unchecked) and isinstance(self._rows, rows.Lazy):
            self._trainer.for_rows(self._rows)
        params = task.init()
        if system.columns:
            of = lambda x: ColumnTable.of(x, mesh, AXIS)
            params["tables"] = {k: of(x) for k, x in params["tables"].items()}
        self.state = self._trainer.init(params)

    def step(self, batch: Any) -> float:
        """Takes a step; the mean loss of all ranks."""
        self.state, loss = self._trainer.step(self.state, batch)
        return float(loss)

    def params(self) -> dict[str, Any]:
        """The parameters as dense training would have them, tables whole."""
        self.state = self.system.flush(self._trainer, self.state)
        params = self.state.params
        if isinstance(self._rows, rows.Lazy):
            settle = jax.jit(rows.settle, static_argnums=2)
            params, _ = settle(params, self.state.opt_state, self._rows)
        whole = lambda x: x.whole() if isinstance(x, ColumnTable) else x
        tables = {k: np.asarray(whole(x)) for k, x in params["tables"].items()}
        return {"tables": tables, "rest": jax.device_get(params["rest"])}


def loss_of(task: Task, rooms: dict[str, int] | None = None) -> Callable[..., jax.Array]:
    """The loss of a rank's share of a batch; all tables are read in one exchange."""

    def loss(params, batch):
        tables, ids = params["tables"], task.ids(batch)
        if any(isinstance(x, ColumnTable) for x in tables.values()):
            vectors = column_lookup(tables, ids, capacity=rooms)
        else:
            vectors = {k: jnp.take(x, ids[k], axis=0) for k, x in tables.items()}
        return task.loss(vectors, params["rest"], batch)

    return loss


def held(state: Any) -> tuple[int, int]:
    """Bytes on one device: of tables, and of what the optimizer keeps for them."""

    def on_one(leaf):
        return leaf.addressable_shards[0].data.nbytes

    tables = sum(map(on_one, jax.tree.leaves(state.params["tables"])))
    pairs = jax.tree_util.tree_leaves_with_path(state.opt_state)
    kept = [leaf for path, leaf in pairs if "'tables'" in jax.tree_util.keystr(path)]
    return tables, sum(map(on_one, kept))
