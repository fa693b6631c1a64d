"""Trains a decoder under `jax.jit` on replicas of shards: FSDP, and sparse sums across.

    python -m examples.decoder_hsdp
    python -m examples.decoder_hsdp --replicas 2 --fsdp 4 --layers 6 --sync dense dgc

The mesh is explicit, with the axes replica and fsdp. Parameters and the optimizer's state
are sharded over fsdp, the fast axis, and replicated over replica, the slow one. A batch is
sharded over both. The step is a plain function under `jax.jit`. `sparsejax.local` leaves
its gradients unreduced, and the first transformation of the chain sums them:

* `dense`: JAX's own sums, a reduce-scatter over fsdp and an all-reduce over replica.
* `zen`: the rows of the embedding that are not zero, and all other gradients densely. The
  losses are those of `dense`.
* `dgc`: the largest hundredth of each large gradient. The rest is added to later gradients.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from rich.console import Console

import sparsejax
from examples.common import devices, report
from examples.common.report import Run
from examples.data import docstrings


WORDS, WIDTH, HEADS, LENGTH = 8_000, 64, 4, 32
WINDOWS = 4  # of each device
LEARNING_RATE = 3e-3
BATCH = ("replica", "fsdp")  # The batch is sharded over both axes,
SHARDED = {"out_sharding": ("fsdp",)}  # each parameter over one, in its first dimension.


class RMSNorm(nnx.Module):
    def __init__(self, width):
        self.scale = nnx.Param(jnp.ones(width), **SHARDED)

    def __call__(self, x):
        x = x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
        return jnp.einsum("btd,d->btd", x, self.scale[...])


class Block(nnx.Module):
    def __init__(self, width, heads, rngs):
        options = {"use_bias": False, "kernel_metadata": SHARDED, "rngs": rngs}
        self.heads = heads
        self.before_attention, self.before_mlp = RMSNorm(width), RMSNorm(width)
        self.qkv = nnx.Linear(width, 3 * width, **options)
        self.out = nnx.Linear(width, width, **options)
        self.up = nnx.Linear(width, 4 * width, **options)
        self.down = nnx.Linear(4 * width, width, **options)

    def __call__(self, x):
        qkv = self.qkv(self.before_attention(x))
        qkv = qkv.reshape(*x.shape[:2], 3, self.heads, -1)
        seen = jax.nn.dot_product_attention(*jnp.moveaxis(qkv, 2, 0), is_causal=True)
        x += self.out(seen.reshape(x.shape))
        return x + self.down(jax.nn.silu(self.up(self.before_mlp(x))))


class Decoder(nnx.Module):
    def __init__(self, words, width, layers, heads, length, rngs):
        normal = nnx.initializers.normal(0.02)
        self.words = nnx.Embed(words, width, embedding_metadata=SHARDED, rngs=rngs)
        self.positions = nnx.Param(normal(rngs.params(), (length, width)), **SHARDED)
        self.blocks = nnx.List(Block(width, heads, rngs) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.head = nnx.Linear(
            width, words, use_bias=False, kernel_metadata=SHARDED, rngs=rngs
        )

    def __call__(self, tokens):
        x = self.words(tokens, out_sharding=P(BATCH))
        x += jax.reshard(jnp.broadcast_to(self.positions[...], x.shape), P(BATCH))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def dense():
    """JAX's own sums: each gradient is resharded as its parameter is."""
    as_param = lambda grad, param: jax.reshard(grad, jax.typeof(param).sharding)
    return optax.stateless(lambda grads, params: jax.tree.map(as_param, grads, params))


def zen():
    return sparsejax.zen_sync("replica", reduce="sum", rules={"embedding": "sparse"})


def dgc():
    return optax.chain(
        sparsejax.dgc(0.01, axis_name="replica"),
        sparsejax.zen_sync("replica", reduce="sum"),
    )


def adamw():
    return optax.adamw(LEARNING_RATE)


SYNCS = {"dense": dense, "zen": zen, "dgc": dgc}


def loss_fn(model, params, tokens):
    """The mean loss over the windows of all devices."""
    logits = nnx.merge(model, params)(tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


def make_step(model, tx):
    """The train step: params, opt_state, tokens -> params, opt_state, loss."""

    @jax.jit(donate_argnums=(0, 1))
    def step(params, opt_state, tokens):
        loss_and_grad = jax.value_and_grad(functools.partial(loss_fn, model))
        loss, grads = loss_and_grad(sparsejax.local(params, BATCH), tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


def train(sync: str, decoder: Decoder, batches: Iterator[np.ndarray], mesh: Mesh) -> Run:
    """Trains a decoder on batches of all devices, from `jax.set_mesh(mesh)`."""
    model, params = nnx.split(decoder, nnx.Param)
    tx = optax.chain(SYNCS[sync](), adamw())
    opt_state = sparsejax.init(tx, params, axis_name="replica")
    step = make_step(model, tx)
    all_reduce = dense_bytes(params, mesh)
    losses, seconds, metrics = [], [], []
    for tokens in batches:
        begin = time.perf_counter()
        tokens = jax.device_put(tokens, NamedSharding(mesh, P(BATCH)))
        params, opt_state, loss = step(params, opt_state, tokens)
        losses.append(float(loss))  # Waits for the step.
        seconds.append(time.perf_counter() - begin)
        sent = all_reduce if sync == "dense" else sparsejax.metrics(opt_state)
        metrics.append({key: float(value) for key, value in sent.items()})
    params = nnx.to_pure_dict(params)
    return Run(
        losses,
        {key: statistics.fmean(m[key] for m in metrics) for key in metrics[0]},
        jax.tree.map(report.numbers, params),
        devices.replicas_equal(params),
        *report.seconds(seconds),
        {},
    )


def dense_bytes(params, mesh: Mesh) -> dict[str, float]:
    """What a device sends to other replicas in an all-reduce of its shards, as metrics."""
    replicas = mesh.shape["replica"]
    shards = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(params))
    sent = 2 * (replicas - 1) / replicas * shards
    names = ("wire_bytes", "payload_bytes", "dense_bytes")
    return {f"sync/{group}{name}": sent for group in ("", "all/") for name in names}


def main(argv: Sequence[str] | None = None) -> dict[str, Run]:
    """Runs the example; `argv` as on the command line. Returns the runs."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.decoder_hsdp", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("--sync", nargs="+", choices=[*SYNCS], default=[*SYNCS], help="a run for each")
    add("--replicas", type=int, default=4, help="size of the slow axis (4)")
    add("--fsdp", type=int, default=2, help="size of the fast axis, a divisor of 32 (2)")
    add("--steps", type=int, default=60, help="steps of each run (60)")
    add("--layers", type=int, default=4, help="blocks of the decoder (4)")
    add("--seed", type=int, default=0, help="of parameters and batches (0)")
    options = parser.parse_args(argv)
    if min(options.replicas, options.fsdp, options.steps, options.layers) < 1:
        parser.error("--replicas, --fsdp, --steps and --layers are at least 1")
    if LENGTH % options.fsdp:
        parser.error(f"--fsdp takes a divisor of {LENGTH}, got {options.fsdp}")
    sizes = options.replicas, options.fsdp
    simulated = devices.simulated(options.replicas * options.fsdp)
    mesh = jax.make_mesh(sizes, ("replica", "fsdp"), devices=simulated)
    console = Console(highlight=False)
    corpus = docstrings.load(WORDS)

    def batches():
        rng = np.random.default_rng(options.seed)
        for _ in range(options.steps):
            starts = rng.integers(0, len(corpus.tokens) - LENGTH, WINDOWS * mesh.size)
            yield corpus.tokens[starts[:, None] + np.arange(LENGTH + 1)]

    runs = {}
    for sync in options.sync:
        with jax.set_mesh(mesh):
            rngs = nnx.Rngs(options.seed)
            decoder = Decoder(WORDS, WIDTH, options.layers, HEADS, LENGTH, rngs)
            runs[sync] = run = train(sync, decoder, batches(), mesh)
        for step in sorted({1, options.steps // 2, options.steps} - {0}):
            console.print(f"{sync:6} step {step:4}  loss {run.losses[step - 1]:.4f}")
        sent, of = run.sent["sync/wire_bytes"], run.sent["sync/dense_bytes"]
        console.print(f"{sync:6} {sent:,.0f} bytes across replicas a step, dense {of:,.0f}")
    report.show(console, report.figures(runs), simulated=True)
    return runs


if __name__ == "__main__":
    main()
