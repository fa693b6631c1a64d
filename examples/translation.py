"""Trains a translator with attention, English to German: three tables, two LSTMs.

    python -m examples.translation
    python -m examples.translation --data my.en my.de     # line by line each other's

Without text of your own the data are the messages of the installed programs, which come
with their translations. One LSTM reads the English words, another writes the German ones
and attends to the English ones. The loss is a sampled softmax, so the gradients of all
three tables, of the words that are read, written and predicted, have few rows.
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
from examples.common.losses import draw_words, sampled_softmax
from examples.common.session import Session
from examples.data import installed, sentences, translations
from examples.data.sentences import END, PAD


LEARNING_RATE = 3e-3
LENGTH = 16  # words of a sentence
# Words of a language, numbers of a row, of an LSTM's state, sentences a device, negatives.
# The larger as in Zen's table 1: 112 million numbers in tables, 31 million elsewhere.
SIZES = {
    "small": (10_000, 128, 128, 32, 256),
    "paper": (72_917, 512, 1_584, 64, 4_096),
}


class Translator(nnx.Module):
    def __init__(self, words, width, hidden, rngs):
        self.read, self.written, self.scored = (
            nnx.Embed(words, width, rngs=rngs) for _ in range(3)
        )
        self.bias = nnx.Param(jnp.zeros(words))
        self.reader, self.writer = (
            nnx.RNN(nnx.OptimizedLSTMCell(width, hidden, rngs=rngs), rngs=rngs)
            for _ in range(2)
        )
        self.asked = nnx.Linear(hidden, hidden, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(2 * hidden, width, rngs=rngs)
        self.hidden = hidden

    def __call__(self, source, before):
        """The vectors that score the next words: [sentences, length, width]."""
        there = source != PAD
        vectors = self.read(source)
        # As the words vary over devices, so does the first state.
        nothing = jnp.zeros_like(vectors[:, 0, :1]) * jnp.zeros(self.hidden)
        state, meaning = self.reader(
            vectors,
            initial_carry=(nothing, nothing),
            seq_lengths=there.sum(1),
            return_carry=True,
        )
        said = self.writer(self.written(before), initial_carry=state)
        match = jnp.einsum("nlh,nmh->nlm", self.asked(said), meaning)
        weights = jax.nn.softmax(jnp.where(there[:, None], match, -1e9), axis=-1)
        seen = jnp.einsum("nlm,nmh->nlh", weights, meaning)
        return jnp.tanh(self.out(jnp.concatenate([said, seen], axis=-1)))


def loss_fn(model, rest, params, batch):
    """The mean loss of the words that one device writes, each after those before it."""
    translator = nnx.merge(model, params, rest)
    before, after = batch["target"][:, :-1], batch["target"][:, 1:]
    hidden = translator(batch["source"], before)
    scored = translator.scored.embedding[...], translator.bias[...]
    losses = sampled_softmax(hidden, *scored, after, batch["negatives"][0])
    counted = after != PAD
    return jnp.where(counted, losses, 0).sum() / counted.sum()


def adam():
    return optax.adam(LEARNING_RATE)


SYNCS = {
    "dense": lambda: (sparsejax.dense_sync(), adam()),
    "zen": lambda: (sparsejax.zen_sync(), adam()),
    "rows": lambda: (sparsejax.zen_sync(), sparsejax.lazy(adam())),
}


def main(argv: Sequence[str] | None = None) -> Session:
    """Runs the example; `argv` as on the command line. Returns the runs."""
    parser = command.parser("translation", __doc__, SYNCS)
    parser.add_argument(
        "--data", nargs=2, metavar=("FROM", "TO"), help="two texts of your own, UTF-8"
    )
    options = command.parse(parser, argv)
    mesh = devices.mesh(options.devices)
    words, width, hidden, size, negatives = SIZES[options.size]
    pairs, versions = read(options.data)
    source, target = sentences.numbered(pairs, words, LENGTH)
    apart = sentences.held_out(pairs)
    kept = {"source": source[~apart], "target": target[~apart]}
    drawn = feeding.shuffled(kept, mesh.size * size, options.seed)

    def batches(start):
        for step, batch in enumerate(drawn(start), start):
            rng = np.random.default_rng((options.seed, step))
            yield batch | {"negatives": draw_words(rng, words, mesh.size, negatives)}

    translator = Translator(words, width, hidden, nnx.Rngs(options.seed))
    model, params, rest = nnx.split(translator, nnx.Param, ...)
    loss = functools.partial(loss_fn, model, rest)
    held_out = {"source": source[apart], "target": target[apart]}
    held_out["negatives"] = draw_words(np.random.default_rng(0), words, 1, negatives)
    evaluate = jax.jit(loss)
    scores = lambda params: {"held_out_loss": float(evaluate(params, held_out))}

    origin = {"sha256": installed.sha256(pairs), "versions": versions}
    session = Session(options, mesh, origin)
    session.about(
        f"{len(pairs):,} pairs of sentences, {(target > END).sum():,} words to write",
        f"three tables of {words:,} x {width}, two LSTMs of {hidden} and attention",
    )
    for name in options.sync:
        sync, optimizer = SYNCS[name]()
        tx = optax.chain(sync, optimizer)
        trainer = sparsejax.data_parallel(loss, tx, mesh)
        session.train(name, trainer, nnx.to_pure_dict(params), batches, optimizer, scores)
    return session.finish()


def read(data):
    """Pairs of short sentences, as words, and their source."""
    if data:
        pairs, names = sentences.read(*data), dict(zip(("from", "to"), data, strict=True))
        versions = {side: Path(name).name for side, name in names.items()}
    else:
        try:
            pairs, catalogues = translations.sentence_pairs()
        except translations.Missing as error:
            raise SystemExit(
                f"There is nothing to train on, {error}: give two texts with --data."
            ) from None
        versions = {"catalogues": str(catalogues)}
    pairs = sentences.short(pairs, LENGTH)
    if len(pairs) < 2:
        raise SystemExit(
            f"There are {len(pairs)} pairs of sentences of 1 to {LENGTH} words; it takes "
            "two or more."
        )
    return pairs, versions


if __name__ == "__main__":
    main()
