"""Every optimizer of optax inside `lazy`, with gradients that are arrays: it is that one.

To the byte, exact and not. Those that mix rows are refused by name; and none is left out.
"""

import inspect

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
CASES = [
    pytest.param(
        name,
        options,
        exact,
        id=f"{name} {sorted(options)[1:]} {exact}",
        marks=[] if name in ALWAYS else [pytest.mark.slow],
    )
    for name, several in KEPT.items()
    for options in several
    for exact in ((True, False) if name in ALWAYS and options is several[0] else (True,))
]


@pytest.mark.parametrize(("name", "options", "exact"), CASES)
def test_it_is_the_optimizer_itself(name, options, exact):
    make = lambda: getattr(optax, name)(**options)
    tx, other = lazy(make(), exact=exact), make()
    grads = np.random.default_rng(1).normal(size=(3, 6, 4)).astype(np.float32)

    def trained(tx, inner):
        @jax.jit
        def step(params, state, grad):
            grads = {"table": grad, "bias": grad[0]}
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        params, state = PARAMS, tx.init(PARAMS)
        for grad in grads:
            params, state = step(params, state, grad)
        return params, inner(state)

    found = trained(tx, lambda state: state.inner)
    assert helpers.octets(found) == helpers.octets(trained(other, lambda state: state))


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
