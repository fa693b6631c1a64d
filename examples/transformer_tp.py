"""Trains a decoder with data and tensor parallelism, and sends 5% of the gradient: DGC.

    python -m examples.transformer_tp
    python -m examples.transformer_tp --devices 8 --shards 4 --data text.txt

Eight simulated devices are four ranks of two: the two share every block, the heads of its
attention and the columns of its wide layer, and sum their outputs. Each rank then sends its
largest gradients to the others, each device for its shards. A tensor has one threshold,
computed from all of its shards: what is sent does not depend on how it is sharded.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

import sparsejax
from examples.common import command, devices, feeding
from examples.common.session import Session
from examples.data import docstrings, text


LEARNING_RATE = 1e-3
DENSITY = 0.05
# Words, numbers of a vector, blocks, heads, words of a window, windows a rank. The larger
# is OPT-2.7B as in table 2 of Zen.
SIZES = {
    "small": (4_000, 128, 2, 4, 32, 8),
    "paper": (50_272, 2_560, 32, 32, 1_024, 1),
}


class Block(nnx.Module):
    """Attention and a wide layer; this device has some heads and some columns of them."""

    def __init__(self, width, heads, rngs):
        normal = nnx.initializers.normal(0.02)
        make = lambda *shape: nnx.Param(normal(rngs.params(), shape))
        self.asked = make(width, 3, heads, width // heads)
        self.told = make(heads, width // heads, width)
        self.up, self.down = make(width, 4 * width), make(4 * width, width)
        self.before, self.between = (nnx.LayerNorm(width, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        ask, key, value = jnp.einsum("nld,dkhe->knhle", self.before(x), self.asked[...])
        match = jnp.einsum("nhle,nhme->nhlm", ask, key) / np.sqrt(ask.shape[-1])
        earlier = jnp.tril(jnp.ones((x.shape[1],) * 2, bool))
        weights = jax.nn.softmax(jnp.where(earlier, match, -1e9), axis=-1)
        seen = jnp.einsum("nhlm,nhme->nhle", weights, value)
        x += jax.lax.psum(jnp.einsum("nhle,hed->nld", seen, self.told[...]), "model")
        wide = jax.nn.relu(self.between(x) @ self.up[...])
        return x + jax.lax.psum(wide @ self.down[...], "model")


# How a block is cut: its heads and its columns, over the axis "model". All else is whole.
CUTS = {
    "asked": P(None, None, "model"),
    "told": P("model"),
    "up": P(None, "model"),
    "down": P("model"),
}


class Decoder(nnx.Module):
    def __init__(self, words, width, blocks, heads, length, rngs):
        small = nnx.initializers.normal(0.02)
        self.words = nnx.Embed(words, width, embedding_init=small, rngs=rngs)
        self.places = nnx.Param(small(rngs.params(), (length, width)))
        self.blocks = nnx.List(Block(width, heads, rngs) for _ in range(blocks))
        self.last = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, tokens):
        x = self.words(tokens) + self.places[...]
        for block in self.blocks:
            x = block(x)
        return self.words.attend(self.last(x))


def specs_of(params):
    """The PartitionSpec of each parameter."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: CUTS.get(path[-1].key, P()), params
    )


def loss_fn(model, params, batch):
    """The mean loss of one rank's windows; each of its devices has shards of `params`."""
    tokens = batch["tokens"]
    logits = nnx.merge(model, params)(tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


def adam():
    return optax.adam(LEARNING_RATE)


def dgc():
    """A sampled threshold for each tensor, shared by its shards; then Zen."""
    sparsifier = sparsejax.dgc(DENSITY, axis_name="data", model_axis="model")
    return optax.chain(sparsifier, sparsejax.zen_sync("data"))


SYNCS = {
    "dense": lambda: (sparsejax.dense_sync("data"), adam()),
    "dgc": lambda: (dgc(), adam()),
}


def main(argv: Sequence[str] | None = None) -> Session:
    """Runs the example; `argv` as on the command line. Returns the runs."""
    parser = command.parser("transformer_tp", __doc__, SYNCS)
    parser.add_argument("--data", metavar="FILE", help="a text of your own, UTF-8")
    parser.add_argument(
        "--shards", type=int, default=2, help="devices that share a model (2)"
    )
    options = command.parse(parser, argv)
    words, width, blocks, heads, length, windows = SIZES[options.size]
    if options.shards < 2 or heads % options.shards:
        parser.error(f"--shards takes a divisor of the {heads} heads from 2 on")
    mesh = devices.mesh(options.devices, shards=options.shards)
    if options.data:
        corpus = text.read(options.data, words, least=10 * length)
    else:
        corpus = docstrings.load()
    tokens = np.where(corpus.tokens < words, corpus.tokens, 0)
    starts = np.arange(0, len(tokens) - length, length)
    drawn = feeding.shuffled({"at": starts}, mesh.shape["data"] * windows, options.seed)

    def batches(start):
        for batch in drawn(start):
            yield {"tokens": tokens[batch["at"][:, None] + np.arange(length + 1)]}

    decoder = Decoder(words, width, blocks, heads, length, nnx.Rngs(options.seed))
    model, params = nnx.split(decoder, nnx.Param)
    params = nnx.to_pure_dict(params)
    loss = functools.partial(loss_fn, model)

    session = Session(options, mesh, {"sha256": corpus.sha256, "versions": corpus.versions})
    session.about(
        f"{len(tokens):,} words, {words:,} of them told apart",
        f"{blocks} blocks, {heads} heads, {width} numbers, cut in {options.shards}",
    )
    for name in options.sync:
        sync, optimizer = SYNCS[name]()
        tx = optax.chain(sync, optimizer)
        trainer = sparsejax.data_parallel(
            loss, tx, mesh, axis_name="data", param_specs=specs_of(params)
        )
        session.train(name, trainer, params, batches)
    return session.finish()


if __name__ == "__main__":
    main()
