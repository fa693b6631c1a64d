"""Trains a language model three times: densely, with sparse gradients, and by rows.

    python -m examples.language_model

Eight simulated devices train in data parallel on the docstrings of the installed packages,
or on a text file of your own (`--data FILE`). The runs differ only in the optax
transformation: `dense` averages dense gradients, `zen` sends what is not zero, and `rows`
has a lazy optimizer after that, so that a step leaves the rows of tables unchanged which
its batch does not read. The losses agree; the bytes that each rank sends do not.

The model is in `examples/lm_model.py`, in plain JAX: this example needs no flax.
"""

from collections.abc import Sequence
from itertools import islice

import optax

import sparsejax
from examples import lm_model
from examples.common import command, devices
from examples.common.session import Session
from examples.data import docstrings, text


LEARNING_RATE = 5e-3
# Words, numbers of a row, numbers of the LSTM's state; the larger as in Zen's table 1, with
# 406 million numbers in tables and 19 million elsewhere.
SIZES = {"small": (20_000, 64, None), "paper": (793_471, 256, 8_192)}


def adam():
    return optax.adam(LEARNING_RATE)


SYNCS = {
    "dense": lambda: (sparsejax.dense_sync(), adam()),
    "zen": lambda: (sparsejax.zen_sync(), adam()),
    "rows": lambda: (sparsejax.zen_sync(), sparsejax.lazy(adam())),
}


def main(argv: Sequence[str] | None = None) -> Session:
    """Runs the example; `argv` as on the command line. Returns the runs."""
    parser = command.parser("language_model", __doc__, SYNCS)
    parser.add_argument("--data", metavar="FILE", help="a text of your own, UTF-8")
    options = command.parse(parser, argv)
    mesh = devices.mesh(options.devices)
    words, width, hidden = SIZES[options.size]
    if options.data:
        corpus = text.read(options.data, words, least=1_000)
    else:
        corpus = docstrings.load(words)

    def batches(start):
        drawn = lm_model.batches(corpus.tokens, words, mesh.size, options.seed)
        return islice(drawn, start, None)

    origin = {"tokens": len(corpus.tokens), "vocabulary": len(corpus.words)}
    origin |= {"sha256": corpus.sha256, "versions": corpus.versions}
    session = Session(options, mesh, origin)
    session.about(
        f"{len(corpus.tokens):,} words, {len(corpus.words):,} different",
        f"two tables of {words:,} x {width} and an LSTM",
    )
    for name in options.sync:
        sync, optimizer = SYNCS[name]()
        tx = optax.chain(sync, optimizer)
        trainer = sparsejax.data_parallel(lm_model.loss_fn, tx, mesh)
        params = lm_model.init(words, width, options.seed, hidden)
        session.train(name, trainer, params, batches, optimizer)
    return session.finish()


if __name__ == "__main__":
    main()
