"""Dropout, batch statistics, evaluation: python -m examples.recipes.evaluation"""

from functools import partial

import jax
import optax
from flax import linen as nn

import sparsejax


jax.config.update("jax_num_cpu_devices", 4)  # Simulated; leave it out where there are GPUs.


class Model(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Dense(64)(x)))
        return nn.Dense(2)(nn.Dropout(0.2, deterministic=not train)(x))


def loss_fn(params, batch, *, variables, key, train=True):
    apply = partial(Model().apply, rngs={"dropout": key}, mutable="batch_stats")
    logits, variables = apply({"params": params, **variables}, batch["x"], train)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
    return loss, ((logits.argmax(-1) == batch["y"]).sum(), variables)


halves = jax.random.normal(jax.random.key(0), (2, 256, 8))
train, test = ({"x": x, "y": (x[:, 0] * x[:, 1] > 0).astype("int32")} for x in halves)
variables = Model().init(jax.random.key(0), train["x"], False)
mesh = jax.make_mesh((4,), ("data",))
tx = optax.chain(sparsejax.zen_sync(), optax.adam(0.01))
evaluate = partial(loss_fn, train=False)
trainer = sparsejax.data_parallel(loss_fn, tx, mesh, aux="sum", eval_fn=evaluate)
state = trainer.init(variables.pop("params"), variables=variables, key=jax.random.key(1))
for epoch in range(1, 61):
    state, _ = trainer.step(state, train)
    if epoch % 20 == 0:
        print("loss {:.3f}, {} of 256 right".format(*trainer.evaluate(state, test)))
