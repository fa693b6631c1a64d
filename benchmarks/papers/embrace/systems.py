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
from sparsejax.embrace import ColumnTable, column_lookup, horizontal, lookahead


Rooms = dict[str, int]  # of each table
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
        sync: Makes the synchronization, from how many rows of each table a rank reads.
        way: Its row of `benchmarks.papers.formulas.embrace.WAYS`.
        by_rows: Whether gradients of tables are rows, and a lazy optimizer applies them.
        columns: Whether tables are sharded by columns.
        ahead: Whether a step is given the next batch, too.
        carries: Whether gradients of all but tables are carried into the next step.
    """

    sync: Callable[[Rooms | None], optax.GradientTransformation]
    way: str
    by_rows: bool = True
    columns: bool = False
    ahead: bool = False
    carries: bool = False

    def feed(self, batches: Iterator[Any]) -> Iterator[tuple[Any, ...]]:
        """From the batches to what each step is given."""
        return lookahead(batches) if self.ahead else ((batch,) for batch in batches)

    @property
    def is_scheduled(self) -> bool:
        """Whether a state may hold what is still to be applied."""
        return self.ahead or self.carries

    @property
    def alike(self) -> str:
        """What it is where a rank is alone: such systems have one and the same step."""
        return "columns" if self.columns else "rows" if self.by_rows else "dense"


def _by(scheme: schemes.Scheme) -> Callable[..., optax.GradientTransformation]:
    return lambda rooms: sparsejax.sync(scheme, rules=TABLES_ALONE, axis_name=AXIS)


def _densely(rooms):
    del rooms
    return sparsejax.dense_sync(axis_name=AXIS)


def _zen(rooms):
    del rooms
    return sparsejax.zen_sync(rules=TABLES_ALONE, axis_name=AXIS)


def _ahead(rooms):
    """Half of the rows that a rank reads of a table may wait."""
    delayed = {f"tables/{name}$": room // 2 for name, room in (rooms or {}).items()}
    return sparsejax.embrace_sync(AXIS, delayed=delayed or 1024)


SYSTEMS = {
    "all-reduce": System(_densely, "all-reduce", by_rows=False),
    "all-gather": System(_by(schemes.AGSparse()), "all-gather"),
    "parallax": System(_by(schemes.SparsePS()), "parallax"),
    "zen rows": System(_zen, "zen rows"),
    "hybrid": System(_densely, "hybrid", columns=True),
    "vertical": System(_ahead, "hybrid", columns=True, ahead=True),
    "horizontal": System(_densely, "hybrid", columns=True, carries=True),
    "both": System(_ahead, "hybrid", columns=True, ahead=True, carries=True),
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
        rooms: Rooms | None = None,
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
        loss, last = loss_of(task, rooms), self._rows
        if system.carries:
            # What is carried is not updated by rows.
            each = {"tables": last, "rest": optimizer}
            labels = lambda params: {
                "tables": {name: "tables" for name in params["tables"]},
                "rest": jax.tree.map(lambda _: "rest", params["rest"]),
            }
            last = optax.partition(each, labels)
        tx = optax.chain(system.sync(rooms), last)
        tx = horizontal(tx, axis_name=AXIS) if system.carries else tx
        trainer = sparsejax.data_parallel if check else Unchecked
        self._trainer = trainer(loss, tx, mesh, axis_name=AXIS)
        if isinstance(self._trainer, Unchecked):
            by_rows = self._rows if isinstance(self._rows, rows.Lazy) else None
            self._trainer.scheduled(by_rows, system.ahead, system.carries)
        params = task.init()
        if system.columns:
            of = lambda x: ColumnTable.of(x, mesh, AXIS)
            params["tables"] = {k: of(x) for k, x in params["tables"].items()}
        self.state = self._trainer.init(params)

    def step(self, *batches: Any) -> float:
        """Takes a step; the mean loss of all ranks.

        Args:
            *batches: As the system's `feed` gives them.
        """
        self.state, loss = self._trainer.step(self.state, *batches)
        return float(loss)

    def params(self) -> dict[str, Any]:
        """The parameters as dense training would have them, tables whole."""
        if self.system.is_scheduled:
            self.state = self._trainer.flush(self.state)
        params = self.state.params
        if isinstance(self._rows, rows.Lazy) and not self.system.is_scheduled:
            settle = jax.jit(rows.settle, static_argnums=2)
            params, _ = settle(params, self.state.opt_state, self._rows)
        whole = lambda x: x.whole() if isinstance(x, ColumnTable) else x
        tables = {k: np.asarray(whole(x)) for k, x in params["tables"].items()}
        return {"tables": tables, "rest": jax.device_get(params["rest"])}


def loss_of(task: Task, rooms: Rooms | None = None) -> Callable[..., jax.Array]:
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
