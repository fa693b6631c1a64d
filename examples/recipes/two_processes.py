"""Two processes: each gives its own NumPy share of the batch, and one prints.

Run without arguments it starts both here; on a cluster each host runs the lower part, and
`jax.distributed.initialize()` finds the others.
"""

import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparsejax


if len(sys.argv) == 1:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    both = [subprocess.Popen([sys.executable, __file__, port, str(i)]) for i in (0, 1)]
    sys.exit(max(process.wait() for process in both))

jax.distributed.initialize(f"localhost:{sys.argv[1]}", 2, int(sys.argv[2]))
mesh = jax.make_mesh((2,), ("data",))


def loss_fn(params, ids):
    logits = params["embedding"][ids] @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids % 10).mean()


tx = optax.chain(sparsejax.zen_sync(), optax.adam(1e-2))
trainer = sparsejax.data_parallel(loss_fn, tx, mesh)
params = {"embedding": np.eye(1000, 16, dtype="f") + 0.1, "out": jnp.zeros((16, 10))}
state = trainer.init(params)
share = np.random.default_rng(jax.process_index()).integers(0, 1000, 128)
place = jax.NamedSharding(mesh, jax.P("data"))
losses = []
for _ in range(60):
    state, loss = trainer.step(state, jax.make_array_from_process_local_data(place, share))
    losses.append(float(loss))
if jax.process_index() == 0:
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last")
    print(f"bytes sent: {sparsejax.metrics(state.opt_state)['sync/wire_bytes']:,.0f}")
