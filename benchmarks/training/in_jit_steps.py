"""The same training under plain `jit` and inside a `shard_map` of one's own.

A `Model` has its loss in both forms. `Run` trains it: under `jit` with parameters that are
sharded or replicated, and in `shard_map` with parameters that are replicated.
"""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import sparsejax
from benchmarks.training.explicit_models import (
    LANGUAGE_SPECS,
    Activations,
    Decoder,
    language,
)
from examples import lm_model
from sparsejax.rows import StripedRows


SHARDS = "fsdp"  # the mesh axis over which parameters may be sharded
STORED = ("input_embedding", "output_embedding")
TABLES = {"|".join(STORED): "row"}


@dataclasses.dataclass(frozen=True)
class Model:
    """What is trained.

    Attributes:
        params: The parameters.
        specs: How they are sharded over "fsdp".
        loss: From `Activations` to the loss under `jit`.
        of_rank: The loss of one rank, inside `shard_map`.
        words: How many words there are.
    """

    params: Any
    specs: Any
    loss: Callable[[Activations], Callable[[Any, Any], jax.Array]]
    of_rank: Callable[[Any, Any], jax.Array]
    words: int

    @classmethod
    def of_language(cls, words: int, width: int) -> "Model":
        """The demo's language model."""

        def of_rank(params, batch):
            own = {name: x[0] for name, x in batch.items() if name != "negatives"}
            return lm_model.loss_fn(params, own | {"negatives": batch["negatives"]})

        params = lm_model.init(words, width)
        return cls(params, LANGUAGE_SPECS, language, of_rank, words)

    @classmethod
    def of_decoder(cls, decoder: Decoder) -> "Model":
        """A decoder, whose gradient is dense."""
        of_rank = decoder.loss(Activations())
        params, specs = decoder.init(), decoder.specs()
        return cls(params, specs, decoder.loss, of_rank, decoder.words)

    def batches(self, tokens: np.ndarray, ranks: int, windows: int = 16) -> Iterator[dict]:
        """Batches of all ranks, without end; each rank has so many windows of a text."""
        tokens = np.minimum(tokens, self.words - 1)
        for batch in lm_model.batches(tokens, self.words, ranks, windows=windows):
            texts = {name: batch[name] for name in ("tokens", "targets")}
            by_rank = {k: x.reshape(ranks, -1, x.shape[-1]) for k, x in texts.items()}
            yield by_rank | {"negatives": batch["negatives"]}


class Run:
    """A training run.

    Attributes:
        params: The parameters.
        state: The state of the transformation.
        step: The step, not yet compiled.
    """

    def __init__(
        self,
        model: Model,
        tx: optax.GradientTransformation,
        mesh: Mesh,
        batches: list[dict],
        *,
        in_jit: bool,
        by_rows: sparsejax.rows.Lazy | None = None,
    ):
        """Places parameters and batches, and makes the state.

        Args:
            model: What is trained.
            tx: The optimizer, with its synchronization.
            mesh: The mesh, with the axis of the replicas first.
            batches: Batches of all ranks, taken in turn.
            in_jit: Whether it trains under plain `jit`.
            by_rows: The optimizer in `tx`, where tables are read and updated by rows.
                These are stored striped then.
        """
        self.mesh, axes = mesh, mesh.axis_names
        params, striped = model.params, None
        if by_rows is not None:
            striped = StripedRows(model.words, mesh.shape[SHARDS])
            stored = {name: np.asarray(striped.stored(params[name])) for name in STORED}
            params = params | stored
        is_sharded = in_jit and SHARDS in axes
        specs = jax.tree.map(lambda spec: spec if is_sharded else P(), model.specs)
        self.params = jax.tree.map(self._placed, params, specs)
        placed = [jax.tree.map(lambda x: self._placed(x, P(axes)), b) for b in batches]
        self._batches = itertools.cycle(placed)
        if in_jit:
            self.state = sparsejax.init(tx, self.params)
            loss_fn = model.loss(Activations(axes, striped))
            self.step = _in_jit(loss_fn, tx, axes, by_rows)
        else:
            names = axes if len(axes) > 1 else axes[0]
            self.state = sparsejax.init(tx, self.params, mesh, names)
            specs = sparsejax.state_specs(self.state)
            self.step = _in_shard_map(model.of_rank, tx, mesh, specs)
        self._compiled = None

    def _placed(self, x, spec):
        sharding = NamedSharding(self.mesh, spec)
        return jax.make_array_from_callback(x.shape, sharding, lambda at: x[at])

    def compile(self) -> None:
        """Traces and compiles the step."""
        with jax.set_mesh(self.mesh):
            like = self.params, self.state, next(self._batches)
            self._compiled = self.step.lower(*like).compile()

    def __call__(self) -> jax.Array:
        """Takes a step, and returns the loss."""
        operands = self.params, self.state, next(self._batches)
        self.params, self.state, loss = self._compiled(*operands)
        return loss

    def digest(self) -> str:
        """A hash of this process's shards of parameters, each shard once."""
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves(self.params):
            shards = {repr(shard.index): shard for shard in leaf.addressable_shards}
            for name in sorted(shards):
                digest.update(np.asarray(shards[name].data))
        return digest.hexdigest()


def _in_jit(loss_fn, tx, axes, lazy):
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch):
        value_and_grad, extra = jax.value_and_grad, {}
        if lazy is not None:
            value_and_grad = sparsejax.value_and_grad
            extra = {"read": lazy.reader(params, state)}
        value_and_grad = value_and_grad(loss_fn, **extra)
        loss, grads = value_and_grad(sparsejax.local(params, axes), batch)
        updates, state = tx.update(grads, state, params, **extra)
        return sparsejax.apply_updates(params, updates), state, loss

    return step


def _in_shard_map(loss_fn, tx, mesh, specs):
    axes = mesh.axis_names

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), specs, P(axes)),
        out_specs=(P(), specs, P()),
    )
    def step(params, state, batch):
        value_and_grad = jax.value_and_grad(loss_fn)
        loss, grads = value_and_grad(sparsejax.local(params, axes), batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, lax.pmean(loss, axes)

    return step
