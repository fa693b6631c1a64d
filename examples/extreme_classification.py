"""Predicts which of thousands of labels apply, and sends 1% of the gradient: DRAGONN.

    python -m examples.extreme_classification
    python -m examples.extreme_classification --data train.txt

Nearly all parameters are in the layer of the labels. DRAGONN finds its largest gradients by
a threshold from a sample, puts them into slots by a hash, and sends these, without a sort
or a second pass. The residual is added to later gradients. The table of features has a
gradient of few rows, which is sent whole.

Without a file of your own, in the format of the extreme classification repository, it
predicts the words of a function's name from its docstring, for the installed source.
"""

import functools
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import sparsejax
from examples.common import command, devices, feeding
from examples.common.session import Session
from examples.data import documented, installed, labeled


LEARNING_RATE = 1e-3
DENSITY = 0.01
HELD_OUT = 20  # of how many examples one is not trained on
# Numbers of the hidden layer, examples a device, and the least features and labels. The
# larger as in DRAGONN, whose layer of the labels of Wiki10-31K has 126.72 million numbers.
SIZES = {"small": (64, 32, 0, 0), "paper": (4_096, 256, 101_938, 30_938)}


class Classifier(nnx.Module):
    def __init__(self, features, hidden, labels, rngs):
        self.features = nnx.Embed(features, hidden, rngs=rngs)
        self.labels = nnx.Linear(hidden, labels, use_bias=False, rngs=rngs)

    def __call__(self, features, values):
        vectors = self.features(jnp.maximum(features, 0))
        return self.labels(jax.nn.relu((vectors * values[..., None]).sum(1)))


def loss_fn(model, params, batch):
    """The mean loss of one device's examples, the labels of each equally likely."""
    scores = nnx.merge(model, params)(batch["features"], batch["values"])
    chances = jax.nn.log_softmax(scores)
    there = batch["labels"] >= 0
    found = jnp.take_along_axis(chances, jnp.maximum(batch["labels"], 0), axis=1)
    return -(jnp.where(there, found, 0).sum(1) / there.sum(1)).mean()


def adam():
    return optax.adam(LEARNING_RATE)


def dragonn():
    """DRAGONN for the layer of the labels, and Zen for what it selects and all else."""
    sparsifier = sparsejax.sparsifiers.Dragonn(DENSITY)
    of_labels = lambda path, leaf: "labels" in path
    return optax.chain(
        sparsejax.sparsify(sparsifier, compress=of_labels), sparsejax.zen_sync()
    )


SYNCS = {
    "dense": lambda: (sparsejax.dense_sync(), adam()),
    "zen": lambda: (sparsejax.zen_sync(), adam()),
    "dragonn": lambda: (dragonn(), adam()),
}


def main(argv: Sequence[str] | None = None) -> Session:
    """Runs the example; `argv` as on the command line. Returns the runs."""
    parser = command.parser("extreme_classification", __doc__, SYNCS)
    parser.add_argument("--data", metavar="FILE", help="examples of your own")
    options = command.parse(parser, argv)
    mesh = devices.mesh(options.devices)
    hidden, size, *least = SIZES[options.size]
    if options.data:
        examples, versions = labeled.read(options.data), {"file": Path(options.data).name}
    else:
        examples, versions = documented.load(), installed.versions()
    features, labels = np.maximum(examples.sizes, least).tolist()
    count = len(examples.labels)
    if count < HELD_OUT:
        raise SystemExit(
            f"There are {count} examples, and {HELD_OUT} are needed: one in {HELD_OUT} is "
            "kept from training."
        )
    apart = np.arange(count) % HELD_OUT == HELD_OUT - 1
    data = {"features": examples.features, "values": examples.values}
    data["labels"] = examples.labels
    kept = {name: x[~apart] for name, x in data.items()}
    batches = feeding.shuffled(kept, mesh.size * size, options.seed)

    network = Classifier(features, hidden, labels, nnx.Rngs(options.seed))
    model, params = nnx.split(network, nnx.Param)
    loss = functools.partial(loss_fn, model)
    told = jax.jit(lambda params, *given: nnx.merge(model, params)(*given).argmax(-1))

    def scores(params):
        """The share of examples whose likeliest label is right: P@1."""
        first = told(params, data["features"][apart], data["values"][apart])
        return {"accuracy": float((data["labels"][apart] == first[:, None]).any(1).mean())}

    origin = {"sha256": examples.sha256(), "versions": versions}
    session = Session(options, mesh, origin)
    session.about(
        f"{len(apart):,} examples, {features:,} features, {labels:,} labels",
        f"a table of {features:,} x {hidden} and a layer of {hidden} x {labels:,}",
    )
    for name in options.sync:
        sync, optimizer = SYNCS[name]()
        tx = optax.chain(sync, optimizer)
        trainer = sparsejax.data_parallel(loss, tx, mesh)
        start = nnx.to_pure_dict(params)
        session.train(name, trainer, start, batches, scores=scores)
    return session.finish()


if __name__ == "__main__":
    main()
