"""Models on explicit meshes, and their steps under `jit` and inside an own `shard_map`.

    language    the demo's language model, of `examples.lm_model`
    decoder     blocks of attention and of two layers, after an embedding

Under `jit` products and lookups name the sharding of their results. Inside `shard_map` the
losses take what one rank has. Batches have a leading axis of ranks.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from sparsejax.rows import StripedRows


@dataclasses.dataclass(frozen=True)
class Activations:
    """How activations are sharded: by their leading axis.

    Attributes:
        axes: Over which mesh axes; none inside `shard_map`.
        striped: How rows of tables are stored; None where they are in order.
    """

    axes: tuple[str, ...] = ()
    striped: StripedRows | None = None

    def spec(self, dims: int) -> P | None:
        """The sharding of activations of so many dimensions."""
        return P(self.axes, *[None] * (dims - 1)) if self.axes else None

    def rows(self, table: jax.Array, ids: jax.Array) -> jax.Array:
        """The rows of a table."""
        if self.striped is not None and table.ndim > 1:
            ids = self.striped.places(ids)
        dims = ids.ndim + table.ndim - 1
        return table.at[ids].get(out_sharding=self.spec(dims))

    def product(self, equation: str, x: jax.Array, w: jax.Array) -> jax.Array:
        """An einsum of activations and a parameter, or of both."""
        dims = len(equation.split("->")[1])
        return jnp.einsum(equation, x, w, out_sharding=self.spec(dims))

    def spread(self, w: jax.Array, like: jax.Array) -> jax.Array:
        """A parameter, broadcast to activations.

        Not by `jax.reshard(jnp.broadcast_to(...))`: each device would make all of it first.
        """
        dims = range(like.ndim - w.ndim, like.ndim)
        spec = self.spec(like.ndim)
        return lax.broadcast_in_dim(w, like.shape, dims, out_sharding=spec)


LANGUAGE_SPECS = {
    "input_embedding": P("fsdp", None),
    "lstm": P(None, "fsdp"),
    "output_embedding": P("fsdp", None),
    "output_bias": P("fsdp"),
}


def language(activations: Activations) -> Callable[[Any, Any], jax.Array]:
    """The mean sampled softmax loss of `examples.lm_model.loss_fn`, over all ranks."""
    take, product = activations.rows, activations.product

    def lstm(kernel, inputs):
        def cell(state, x):
            hidden, memory = state
            both = jnp.concatenate([x, hidden], axis=-1)
            gates = product("rwi,io->rwo", both, kernel)
            enter, forget, leave, new = jnp.split(gates, 4, axis=-1)
            kept = jax.nn.sigmoid(forget + 1) * memory
            memory = kept + jax.nn.sigmoid(enter) * jnp.tanh(new)
            hidden = jax.nn.sigmoid(leave) * jnp.tanh(memory)
            return (hidden, memory), hidden

        nothing = jnp.zeros_like(inputs[0])
        return lax.scan(cell, (nothing, nothing), inputs)[1]

    def corrected(bias, words):
        share = jnp.log1p(1 / (words + 1.0)) / np.log(len(bias) + 1)
        return take(bias, words) - jnp.log(share)

    def loss_fn(params, batch):
        targets, negatives = batch["targets"], batch["negatives"]
        inputs = take(params["input_embedding"], batch["tokens"])
        hidden = lstm(params["lstm"], inputs.transpose(2, 0, 1, 3)).transpose(1, 2, 0, 3)
        table, bias = params["output_embedding"], params["output_bias"]
        words = targets.reshape(len(targets), -1)
        rows = take(table, jnp.concatenate([words, negatives], axis=1))
        of_targets = rows[:, : words.shape[1]].reshape(hidden.shape)
        right = product("rwld,rwld->rwl", hidden, of_targets) + corrected(bias, targets)
        wrong = product("rwld,rnd->rwln", hidden, rows[:, words.shape[1] :])
        of_negatives = corrected(bias, negatives)
        wrong += of_negatives[:, None, None]
        # A negative that happens to be the right word is none.
        same = targets[..., None] == negatives[:, None, None]
        wrong = jnp.where(same, -jnp.inf, wrong)
        scores = jnp.concatenate([right[..., None], wrong], axis=-1)
        return jnp.mean(jax.nn.logsumexp(scores, axis=-1) - right)

    return loss_fn


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A decoder of blocks of attention and of two layers.

    Attributes:
        words: How many words there are.
        width: Numbers of a word's vector.
        layers: How many blocks.
    """

    words: int = 1024
    width: int = 384  # half of a square has more numbers than what is always summed densely
    layers: int = 2

    def init(self, seed: int = 0) -> dict[str, Any]:
        """The parameters."""
        rng = np.random.default_rng(seed)
        width, wide = self.width, 4 * self.width

        def draw(*shape):
            return (rng.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)

        shapes = {name: (width, width) for name in "qkvo"}
        shapes |= {"up": (width, wide), "down": (wide, width)}
        params = {"embedding": draw(self.words, width), "head": draw(width, self.words)}
        for at in range(self.layers):
            block = {name: draw(*shape) for name, shape in shapes.items()}
            params[f"block {at}"] = block | {"bias": np.zeros(wide, np.float32)}
        return params

    def specs(self) -> dict[str, Any]:
        """How parameters are sharded over "fsdp"."""
        block = {name: P("fsdp", None) for name in ("q", "k", "v", "down")}
        block |= {"o": P(None, "fsdp"), "up": P(None, "fsdp"), "bias": P("fsdp")}
        blocks = {f"block {at}": block for at in range(self.layers)}
        return {"embedding": P("fsdp", None), "head": P(None, "fsdp")} | blocks

    def loss(self, activations: Activations) -> Callable[[Any, Any], jax.Array]:
        """The mean loss of the next word."""
        product = activations.product

        def normed(x):
            x = x - x.mean(-1, keepdims=True)
            return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)

        def block(x, w):
            z = normed(x)
            q, k, v = (product("rwti,io->rwto", z, w[name]) for name in "qkv")
            scores = product("rwqd,rwkd->rwqk", q, k) / np.sqrt(self.width)
            length = x.shape[2]
            earlier = jnp.tril(jnp.ones((length, length), bool))
            scores = jnp.where(activations.spread(earlier, scores), scores, -jnp.inf)
            found = product("rwqk,rwkd->rwqd", jax.nn.softmax(scores), v)
            x = x + product("rwti,io->rwto", found, w["o"])
            z = product("rwti,io->rwto", normed(x), w["up"])
            z = jax.nn.gelu(z + activations.spread(w["bias"], z))
            return x + product("rwti,io->rwto", z, w["down"])

        def loss_fn(params, batch):
            x = activations.rows(params["embedding"], batch["tokens"])
            for at in range(self.layers):
                x = block(x, params[f"block {at}"])
            logits = product("rwti,io->rwto", normed(x), params["head"])
            wanted = jax.nn.one_hot(batch["targets"], self.words)
            return optax.softmax_cross_entropy(logits, wanted).mean()

        return loss_fn
