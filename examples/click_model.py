"""Trains DeepFM on clicks: a table of millions of rows, of which a step reads a few.

    python -m examples.click_model
    python -m examples.click_model --data train.txt     # a log in the format of Criteo's

Without a log of your own the example makes one from data that every machine has: each call
in the installed Python source is an impression of twelve categories, and a keyword argument
is the click.

DeepFM sums three terms: a weight of each category, the products of the vectors of all pairs
of categories, and the output of a network on the concatenated vectors.
"""

import functools
import hashlib
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import sparsejax
from examples.common import command, devices, feeding
from examples.common.session import Session
from examples.data import calls, criteo, installed


LEARNING_RATE = 1e-3
HELD_OUT = 50  # of how many examples one is not trained on
# Rows of the table, numbers of a vector, of the network's hidden layers, examples a device.
# The larger as in Zen's table 1: 214 million numbers in the table, 68 million elsewhere.
SIZES = {
    "small": (2**18, 16, (64, 64), 256),
    "paper": (12_588_235, 16, (5_700, 5_700, 5_700), 1_024),
}


class DeepFM(nnx.Module):
    def __init__(self, fields, rows, width, hidden, rngs):
        # Of each category its weight, and behind it its vector: one lookup for both.
        small = nnx.initializers.normal(0.01)
        self.table = nnx.Embed(rows, 1 + width, embedding_init=small, rngs=rngs)
        sizes = (fields * width, *hidden, 1)
        self.layers = nnx.List(
            nnx.Linear(a, b, rngs=rngs) for a, b in itertools.pairwise(sizes)
        )

    def __call__(self, ids):
        found = self.table(ids)  # [examples, fields, 1 + width]
        weights, vectors = found[..., 0], found[..., 1:]
        # The sum over pairs is half of the square of the sum, less the sum of the squares.
        pairs = jnp.square(vectors.sum(1)) - jnp.square(vectors).sum(1)
        x = vectors.reshape(len(ids), -1)
        for layer in self.layers[:-1]:
            x = jax.nn.relu(layer(x))
        return weights.sum(1) + pairs.sum(1) / 2 + self.layers[-1](x)[:, 0]


def loss_fn(model, params, batch):
    """The mean loss of one device's share of a batch."""
    scores = nnx.merge(model, params)(batch["ids"])
    return optax.sigmoid_binary_cross_entropy(scores, batch["clicked"]).mean()


def adam():
    return optax.adam(LEARNING_RATE)


SYNCS = {
    "dense": lambda: (sparsejax.dense_sync(), adam()),
    "zen": lambda: (sparsejax.zen_sync(), adam()),
    "rows": lambda: (sparsejax.zen_sync(), sparsejax.lazy(adam())),
}


def main(argv: Sequence[str] | None = None) -> Session:
    """Runs the example; `argv` as on the command line. Returns the runs."""
    parser = command.parser("click_model", __doc__, SYNCS)
    parser.add_argument("--data", metavar="FILE", help="a log in the format of Criteo's")
    parser.add_argument(
        "--most", type=int, default=10**6, help="lines of it that are read (1,000,000)"
    )
    parser.add_argument("--rows", type=int, help="rows of the table")
    options = command.parse(parser, argv)
    mesh = devices.mesh(options.devices)
    rows, width, hidden, examples = SIZES[options.size]
    rows = options.rows or rows
    if options.data:
        log, sha256 = criteo.read(options.data, options.most)
        versions = {"log": options.data}
    else:
        log, versions = calls.hashed(), installed.versions()
        sha256 = hashlib.sha256(log["categories"].tobytes()).hexdigest()
    data = {"ids": (log["categories"] % rows).astype(np.int32), "clicked": log["clicked"]}
    kept, held_out = held_out_of(data)
    batches = feeding.shuffled(kept, mesh.size * examples, options.seed)

    fields = data["ids"].shape[1]
    network = DeepFM(fields, rows, width, hidden, nnx.Rngs(options.seed))
    model, params = nnx.split(network, nnx.Param)
    loss = functools.partial(loss_fn, model)
    evaluate = jax.jit(loss)
    scores = lambda params: {"held_out_loss": float(evaluate(params, held_out))}

    session = Session(options, mesh, {"sha256": sha256, "versions": versions})
    session.about(
        f"{len(data['ids']):,} examples of {fields} categories, of which "
        f"{data['clicked'].mean():.1%} were clicked",
        f"a table of {rows:,} x {1 + width} and a network of {len(hidden)} hidden layers",
    )
    for name in options.sync:
        sync, optimizer = SYNCS[name]()
        tx = optax.chain(sync, optimizer)
        trainer = sparsejax.data_parallel(loss, tx, mesh)
        session.train(name, trainer, nnx.to_pure_dict(params), batches, optimizer, scores)
    return session.finish()


def held_out_of(data):
    """The examples to train on, and one in fifty that is held out."""
    count = len(data["clicked"])
    if count < HELD_OUT:
        raise SystemExit(
            f"There are {count} examples, and {HELD_OUT} are needed: one in {HELD_OUT} is "
            "kept from training."
        )
    apart = np.arange(count) % HELD_OUT == HELD_OUT - 1
    return [{name: x[which] for name, x in data.items()} for which in (~apart, apart)]


if __name__ == "__main__":
    main()
