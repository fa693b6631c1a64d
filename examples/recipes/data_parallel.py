"""A train step made by `data_parallel`: python -m examples.recipes.data_parallel"""

import jax
import numpy as np
import optax

import sparsejax


jax.config.update("jax_num_cpu_devices", 4)  # Simulated; leave it out where there are GPUs.
WORDS, WIDTH, CLASSES = 5_000, 16, 4


def loss_fn(params, batch):
    """The mean loss over one device's share of the batch."""
    vectors = params["embedding"][batch["words"]].mean(axis=1)
    logits = vectors @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["class"]).mean()


rng = np.random.default_rng(0)
params = {
    "embedding": 0.1 * rng.standard_normal((WORDS, WIDTH), np.float32),
    "head": 0.1 * rng.standard_normal((WIDTH, CLASSES), np.float32),
}
mesh = jax.make_mesh((4,), ("data",))
tx = optax.chain(sparsejax.zen_sync(), optax.adam(0.03))
trainer = sparsejax.data_parallel(loss_fn, tx, mesh)
state = trainer.init(params)
for step in range(1, 31):
    topic = rng.integers(0, CLASSES, 64)
    words = (CLASSES * rng.zipf(1.5, (64, 8)) + topic[:, None]) % WORDS
    batch = {"words": words, "class": topic}  # Its examples are split over the devices.
    state, loss = trainer.step(state, batch)
    if step % 10 == 0:
        print(f"step {step}: loss {loss:.3f}")
sent = sparsejax.metrics(state.opt_state)
print(f"{sent['sync/wire_bytes']:,.0f} bytes, dense {sent['sync/dense_bytes']:,.0f}")
