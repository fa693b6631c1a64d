"""A transformer of a few blocks, and its train step for devices that are only described.

Words are a table sharded by columns, as EmbRace has them; blocks and head are dense. Scopes
name what is of which block in the compiled program.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import sparsejax
from sparsejax.training import TrainState


AXIS = "data"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of the model and of a rank's batch.

    Attributes:
        blocks: How many blocks.
        width: Of the hidden states; the inner layer is four times as wide.
        heads: Of the attention.
        words: In the vocabulary.
        length: Of a sentence.
        sentences: A rank's share of a batch.
    """

    blocks: int = 6
    width: int = 1024
    heads: int = 16
    words: int = 8192
    length: int = 512
    sentences: int = 64

    @property
    def order(self) -> list[str]:
        """The dense blocks in the order of a forward."""
        return [*(f"blocks/{at}" for at in range(self.blocks)), "head"]


def parameters(sizes: Sizes) -> Any:
    """The shapes of the parameters."""
    d = sizes.width
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    block = {"norms": of(2, d), "qkv": of(d, 3 * d), "out": of(d, d)}
    block |= {"up": of(d, 4 * d), "down": of(4 * d, d)}
    words = sparsejax.ColumnTable(of(sizes.words, d), d, AXIS)
    head = {"norm": of(d), "kernel": of(d, sizes.words)}
    return {"words": words, "blocks": [dict(block) for _ in range(sizes.blocks)]} | {
        "head": head
    }


def loss_fn(params, batch):
    """The mean cross entropy of the next word."""
    with jax.named_scope("words"):
        hidden = sparsejax.column_lookup(params["words"], batch["ids"])
    for at, block in enumerate(params["blocks"]):
        with jax.named_scope(f"block {at}"):
            hidden = hidden + _attention(block, _norm(hidden, block["norms"][0]))
            inner = jax.nn.gelu(_norm(hidden, block["norms"][1]) @ block["up"])
            hidden = hidden + inner @ block["down"]
    with jax.named_scope("head"):
        logits = _norm(hidden, params["head"]["norm"]) @ params["head"]["kernel"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"])
        return losses.mean()


def _norm(x, scale):
    return x * scale * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def _attention(block, x):
    heads = block["qkv"].shape[0] // 64
    q, k, v = jnp.split((x @ block["qkv"]).reshape(*x.shape[:2], heads, -1), 3, axis=-1)
    return jax.nn.dot_product_attention(q, k, v).reshape(x.shape) @ block["out"]


def lowered(
    tx: optax.GradientTransformation, sizes: Sizes, mesh: Mesh, has_next: bool = False
) -> Any:
    """A step of `data_parallel` with this optimizer, traced for these devices.

    Args:
        tx: The optimizer.
        sizes: Of the model.
        mesh: The devices.
        has_next: Whether the step is given the next batch, too.
    """
    trainer = sparsejax.data_parallel(loss_fn, tx, mesh)
    params = parameters(sizes)
    specs = sparsejax.state_specs(params)
    place = lambda x, spec: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
    )
    params = jax.tree.map(place, params, specs)
    step = place(jax.ShapeDtypeStruct((), jnp.int32), P())
    state = TrainState(step, params, sparsejax.abstract_state(tx, params, mesh))
    ids = jax.ShapeDtypeStruct((mesh.size * sizes.sentences, sizes.length), jnp.int32)
    batch = dict.fromkeys(("ids", "next"), place(ids, P(AXIS)))
    batches = [batch] * (1 + has_next)
    return trainer.compiled(state, has_next=has_next).lower(state, *batches)
