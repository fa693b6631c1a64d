"""Trains a table and a head in data parallel: in one process, or as a job of several.

    python -m examples.multi_host.start examples.multi_host.train --steps 100

The script names no host: every process runs it, draws its own examples, and the mesh spans
the devices of all.
"""

import argparse

import jax
import numpy as np
import optax

import sparsejax


WORDS, WIDTH, CLASSES, SHARE = 5_000, 16, 4, 64


def loss_fn(params, batch):
    """The mean loss over one device's share of the batch."""
    vectors = params["embedding"][batch["words"]].mean(axis=1)
    logits = vectors @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["class"]).mean()


def model():
    """The optimizer and the parameters, the same on every process: from one seed."""
    rng = np.random.default_rng(0)
    params = {
        "embedding": 0.1 * rng.standard_normal((WORDS, WIDTH), np.float32),
        "head": 0.1 * rng.standard_normal((WIDTH, CLASSES), np.float32),
    }
    return optax.chain(sparsejax.zen_sync("data"), optax.adam(0.03)), params


def batches(examples):
    """Yields batches without end, different ones on each process."""
    rng = np.random.default_rng([1, jax.process_index()])
    while True:
        topic = rng.integers(0, CLASSES, examples)
        words = (CLASSES * rng.zipf(1.5, (examples, 8)) + topic[:, None]) % WORDS
        yield {"words": words, "class": topic}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    tx, params = model()
    trainer = sparsejax.data_parallel(
        loss_fn, tx, jax.make_mesh((jax.device_count(),), ("data",))
    )
    state = trainer.init(params)
    own = batches(SHARE * jax.local_device_count())
    for step in range(1, steps + 1):
        state, loss = trainer.step(state, next(own))
        # The loss is the same on all; one process is enough to tell it.
        if jax.process_index() == 0 and step in (1, steps // 2, steps):
            print(f"step {step}: loss {loss:.3f}", flush=True)
    sent = sparsejax.metrics(state.opt_state)
    if jax.process_index() == 0:
        print(f"{jax.process_count()} processes, {jax.device_count()} devices")
        print(
            f"{sent['sync/wire_bytes']:,.0f} bytes, dense {sent['sync/dense_bytes']:,.0f}"
        )


if __name__ == "__main__":
    main()
