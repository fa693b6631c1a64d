"""Two processes, each with its own share of the batch; on a cluster, one a host."""

import socket
import subprocess
import sys

import jax
import numpy as np
import optax

import sparsejax


if len(sys.argv) == 1:  # Starts both; a cluster's launcher does this elsewhere.
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    both = [subprocess.Popen([sys.executable, __file__, port, str(i)]) for i in (0, 1)]
    sys.exit(max(process.wait() for process in both))

jax.distributed.initialize(f"localhost:{sys.argv[1]}", 2, int(sys.argv[2]))


def loss_fn(params, ids):
    logits = params["embedding"][ids] @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids % 10).mean()


tx = optax.chain(sparsejax.zen_sync(), optax.adam(3e-2))
trainer = sparsejax.data_parallel(loss_fn, tx, jax.make_mesh((2,), ("data",)))
normal = np.random.default_rng(0).standard_normal
state = trainer.init({"embedding": normal((1000, 16), "f"), "out": normal((16, 10), "f")})
share = np.random.default_rng(jax.process_index()).integers(0, 1000, 128)
losses = []
for _ in range(20):
    state, loss = trainer.step(state, share)
    losses.append(float(loss))
if jax.process_index() == 0:  # Nothing here waits for the other process.
    print(f"loss {losses[0]:.3f}, then loss {losses[-1]:.3f}")
    print(f"bytes sent: {sparsejax.metrics(state.opt_state)['sync/wire_bytes']:,.0f}")
