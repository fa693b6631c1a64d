"""Every optimizer of optax inside `lazy`, with gradients that are arrays: it is that one.

To the byte, exact and not. Those that mix rows are refused by name; and none is left out.
"""

import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sparsejax.errors import ArgumentError
from sparsejax.rows import lazy
from tests import helpers


PARAMS = {
    "table": np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32),
    "bias": np.ones(4, np.float32),
}
RATE = {"learning_rate": 0.05}
# The options of each; several where they lead elsewhere.
KEPT = {
    "adabelief": [RATE],
    "adadelta": [RATE],
    "adagrad": [RATE],
    "adam": [RATE, RATE | {"nesterov": True}, RATE | {"mu_dtype": jnp.bfloat16}],
    "adamax": [RATE],
    "adamaxw": [RATE],
    "adamw": [RATE, {"learning_rate": optax.linear_schedule(0.1, 0, 9)}],
    "adan": [RATE],
    "amsgrad": [RATE],
    "lion": [RATE],
    "nadam": [RATE],
    "nadamw": [RATE],
    "radam": [RATE],
    "rmsprop": [RATE, RATE | {"momentum": 0.9}, RATE | {"centered": True}],
    "rprop": [RATE],
    "sgd": [RATE, RATE | {"momentum": 0.9}, RATE | {"momentum": 0.9, "nesterov": True}],
    "sign_sgd": [RATE],
    "signum": [RATE],
    "yogi": [RATE],
}
# One of each kind of state: none, one moment or a sum of squares, two.
ALWAYS = ["adagrad", "adamax", "lion", "sgd"]
# Of these a table is refused; the optimistic ones are taken with exact=False.
REFUSED = {
    **dict.fromkeys(("adafactor", "fromage", "lamb", "lars", "novograd", "sm3"), RATE),
    "optimistic_adam_v2": RATE,
    "optimistic_gradient_descent": RATE,
    "noisy_sgd": RATE | {"key": 0},
    "lbfgs": {},
    "polyak_sgd": {},
}
# The old name of `optimistic_adam_v2`, which warns.
OTHERS = {"optimistic_adam"}


@pytest.mark.parametrize("name", helpers.mostly_slow(KEPT, *ALWAYS))
def test_it_is_the_optimizer_itself(name):
    each = {str(options): getattr(optax, name)(**options) for options in KEPT[name]}
    grads = np.random.default_rng(1).normal(size=(3, 6, 4)).astype(np.float32)

    def trained(each, inner=lambda state: state):
        @jax.jit
        def step(runs, grad):
            grads = {"table": grad, "bias": grad[0]}
            for key, tx in each.items():
                params, state = runs[key]
                updates, state = tx.update(grads, state, params)
                runs[key] = optax.apply_updates(params, updates), state
            return runs

        runs = {key: (PARAMS, tx.init(PARAMS)) for key, tx in each.items()}
        for grad in grads:
            runs = step(runs, grad)
        return {k: helpers.octets((p, inner(state))) for k, (p, state) in runs.items()}

    wanted = trained(each)
    both = itertools.product(each, (True, False))
    ours = {(key, exact): lazy(each[key], exact=exact) for key, exact in both}
    for (key, exact), found in trained(ours, lambda state: state.inner).items():
        assert found == wanted[key], (key, exact)


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_keep_rows_apart_is_refused_by_name(name):
    tx = lazy(getattr(optax, name)(**REFUSED[name]))
    with pytest.raises(ArgumentError, match="lazy: "):
        tx.init({"table": PARAMS["table"]})


def test_every_optimizer_of_optax_is_here():
    found = {
        name
        for name, made in inspect.getmembers(optax)
        if getattr(getattr(made, "func", made), "__module__", "") == "optax._src.alias"
        and not inspect.isclass(made)
    }
    assert found == {*KEPT, *REFUSED, *OTHERS}
