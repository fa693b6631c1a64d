"""EmbRace's hybrid communication under the examples' losses: tables sharded by columns.

    python -m benchmarks.workloads.by_columns language_model --steps 20 --json

takes an example's options, trains it once, with its tables by columns and all else by
`zen_sync` with the lazy optimizer that its run `rows` has, and prints what the example
prints. All rows that a loss reads come in one exchange before it; the loss is the
example's, but for the translator's, whose lookups are replaced by what came.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec as P

import sparsejax
from benchmarks.workloads.collected import Collecting, Training, collect
from examples.common.losses import sampled_softmax
from sparsejax.embrace import ColumnTable
from sparsejax.placement.initial import on_ranks


NAME = "embrace"
AXIS = "data"
Tables = dict[str, Any]


class Columns(NamedTuple):
    """The tables of an example, and how its loss is given their rows.

    Attributes:
        paths: Of the tables in the parameters.
        ids: From a rank's batch to the ids of each table.
        loss: From the example's loss, the rows of these ids, the parameters and the batch
            to the rank's loss.
    """

    paths: dict[str, tuple[str, ...]]
    ids: Callable[[Any], Tables]
    loss: Callable[[Any, Tables, Any, Any], jax.Array]


class Looked:
    """A table that knows the answer: its rows of the ids that are looked up."""

    def __init__(self, found: jax.Array):
        self._found = found

    def __getitem__(self, ids):
        assert self._found.shape[:-1] == ids.shape, (self._found.shape, ids.shape)
        return self._found


# --- The language model.


def _ids_of_text(batch):
    scored = [batch["targets"].reshape(-1), batch["negatives"].reshape(-1)]
    return {"input_embedding": batch["tokens"], "output_embedding": jnp.concatenate(scored)}


def _language_loss(loss, vectors, params, batch):
    return loss(params | {name: Looked(found) for name, found in vectors.items()}, batch)


# --- The click model.


def _click_loss(loss, vectors, params, batch):
    rows = vectors["table"].reshape(batch["ids"].size, -1)
    places = jnp.arange(batch["ids"].size).reshape(batch["ids"].shape)
    return loss(params | {"table": {"embedding": rows}}, batch | {"ids": places})


# --- The translator.


def _ids_of_sentences(batch):
    scored = [batch["target"][:, 1:].reshape(-1), batch["negatives"].reshape(-1)]
    ids = {"read": batch["source"], "written": batch["target"][:, :-1]}
    return ids | {"scored": jnp.concatenate(scored)}


def _translation_loss(loss, vectors, params, batch):
    from flax import nnx

    from examples.data.sentences import PAD

    class Answer(nnx.Module):
        """An embedding of ids that are looked up already."""

        def __init__(self, found):
            self.found = nnx.Param(found)

        def __call__(self, ids):
            assert self.found.shape[:-1] == ids.shape
            return self.found[...]

    model, rest = loss.args
    nothing = {"embedding": jnp.zeros((1, 1))}
    params = params | dict.fromkeys(vectors, nothing)
    translator = nnx.merge(model, params, rest)
    translator.read = Answer(vectors["read"])
    translator.written = Answer(vectors["written"])
    before, after = batch["target"][:, :-1], batch["target"][:, 1:]
    hidden = translator(batch["source"], before)
    scored, bias = Looked(vectors["scored"]), translator.bias[...]
    losses = sampled_softmax(hidden, scored, bias, after, batch["negatives"][0])
    counted = after != PAD
    return jnp.where(counted, losses, 0).sum() / counted.sum()


COLUMNS = {
    "language_model": Columns(
        {name: (name,) for name in ("input_embedding", "output_embedding")},
        _ids_of_text,
        _language_loss,
    ),
    "click_model": Columns(
        {"table": ("table", "embedding")},
        lambda batch: {"table": batch["ids"]},
        _click_loss,
    ),
    "translation": Columns(
        {name: (name, "embedding") for name in ("read", "written", "scored")},
        _ids_of_sentences,
        _translation_loss,
    ),
}


def tables_of(example: str, params: Any) -> Tables:
    """The tables of an example's parameters, by name."""
    found = {}
    for name, path in COLUMNS[example].paths.items():
        found[name] = params
        for key in path:
            found[name] = found[name][key]
    return found


def _with_tables(example, params, tables):
    """The parameters with others in the places of their tables."""
    params = dict(params)
    for name, path in COLUMNS[example].paths.items():
        params[path[0]] = tables[name] if len(path) == 1 else {path[1]: tables[name]}
    return params


def rooms(example: str, batches: Iterable[Any], ranks: int) -> dict[str, int]:
    """The most different rows of each table that a rank reads in these, and a twentieth."""
    most = dict.fromkeys(COLUMNS[example].paths, 0)
    for batch in batches:
        for rank in range(ranks):
            own = jax.tree.map(lambda x, rank=rank: np.array_split(x, ranks)[rank], batch)
            for name, ids in COLUMNS[example].ids(own).items():
                most[name] = max(most[name], len(np.unique(ids)))
    return {name: round(1.05 * count) for name, count in most.items()}


def by_columns(
    example: str, rows: Training, mesh: Mesh, capacity: dict[str, int]
) -> Training:
    """A training with tables by columns, from that by rows.

    Args:
        example: The example.
        rows: Its run `rows`.
        mesh: The devices.
        capacity: From `rooms`.
    """
    columns = COLUMNS[example]

    def loss(params, batch):
        tables = tables_of(example, params)
        vectors = sparsejax.column_lookup(tables, columns.ids(batch), capacity=capacity)
        return columns.loss(rows.loss, vectors, params, batch)

    tables = {
        name: ColumnTable.of(table, mesh, AXIS)
        for name, table in tables_of(example, rows.params).items()
    }
    params = _with_tables(example, rows.params, tables)
    assert rows.optimizer is not None
    tx = optax.chain(sparsejax.zen_sync(), rows.optimizer)
    trainer = sparsejax.data_parallel(loss, tx, mesh)

    def scores(params):
        whole = {name: x.whole() for name, x in tables_of(example, params).items()}
        return rows.scores(_with_tables(example, params, whole)) if rows.scores else {}

    return rows._replace(trainer=trainer, loss=loss, params=params, scores=scores)


def lookups(example: str, params: Any, batch: Any, mesh: Mesh, capacity: Any) -> float:
    """Bytes that a rank sends in a step for rows of tables, forward and backward."""

    def sent(tables, batch):
        ids = COLUMNS[example].ids(batch)
        traffic = sparsejax.column_lookup(tables, ids, capacity=capacity, traffic=True)[1]
        return traffic.wire

    tables = tables_of(example, params)
    specs = sparsejax.state_specs(tables), P(AXIS)
    counted = on_ranks(sent, mesh=mesh, in_specs=specs, out_specs=P())
    return float(jax.jit(counted)(tables, batch))


def main(argv: Sequence[str]) -> Collecting:
    """Trains an example by columns; `argv` is its name and its options."""
    example, *options = argv
    if example not in COLUMNS:
        raise SystemExit(f"name one of {', '.join(COLUMNS)}, got {example!r}.")
    session = collect(example, [*options, "--sync", "rows"])
    rows, mesh = session.trainings["rows"], session.mesh
    drawn = rows.batches(0)
    first = [next(drawn) for _ in range(20)]
    capacity = rooms(example, first, mesh.size)
    training = by_columns(example, rows, mesh, capacity)
    run = session.really_train(NAME, training)
    of_tables = lookups(example, training.params, first[0], mesh, capacity)
    for key in ("sync/wire_bytes", "sync/payload_bytes"):
        run.sent[key] += of_tables
    session.really_finish()
    return session


if __name__ == "__main__":
    main(sys.argv[1:])
