"""What a function that makes a transformation shows of itself, and of what it made.

`help`, editors and `optax.inject_hyperparams` read a function's signature, and the last one
takes `**options` for an argument of that name: `hands_on` lists the options. What was made
prints as the call that made it: `described`.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import optax

from sparsejax.errors import ArgumentError
from sparsejax.transforms.state.tree import Transformation


_Function = TypeVar("_Function", bound=Callable[..., Any])


def hands_on(options: type, to: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """Makes a function's `**options` read as the arguments that they are.

    Args:
        options: The TypedDict of the options.
        to: The function that takes them, with their defaults.
    """
    theirs = inspect.signature(to).parameters
    own = [
        theirs[name].replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name in options.__annotations__
    ]

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)
        named = signature.parameters.values()
        named = [p for p in named if p.kind is not inspect.Parameter.VAR_KEYWORD]
        function.__signature__ = signature.replace(parameters=[*named, *own])  # type: ignore
        return function

    return decorate


def described(function: _Function) -> _Function:
    """Makes what a function returns print as the call of it, `zen_sync(axis_name='data')`.

    The function in a chain, where its result belongs, is told from that result.
    """
    signature = inspect.signature(function)
    name = function.__name__

    @functools.wraps(function)
    def call(*args, **kwargs):
        tx = function(*args, **kwargs)
        if not isinstance(tx, Transformation):
            tx = Transformation(tx.init, tx.update)
        tx.text = f"{name}({_arguments(signature, args, kwargs)})"
        return tx

    def not_called(params):
        del params
        raise ArgumentError(
            f"the chain has the function {name} in it, and not the transformation that it "
            f"makes: call it, {name}(...)."
        )

    # All that optax asks for before a state is made.
    call.init = not_called  # type: ignore
    return call  # type: ignore


def _arguments(signature, args, kwargs):
    """The arguments that are not the defaults, by name."""
    given = signature.bind(*args, **kwargs).arguments
    defaults = {name: p.default for name, p in signature.parameters.items()}
    shown = {k: brief(v) for k, v in given.items() if v is not defaults[k]}
    return ", ".join(
        f"{k}={text}" for k, text in shown.items() if text != brief(defaults[k])
    )


def brief(value: Any) -> str:
    """A value for people: without defaults, and cut where it would be long."""
    if isinstance(value, optax.GradientTransformation) and not isinstance(
        value, Transformation
    ):
        maker = getattr(value.init, "__qualname__", type(value).__name__)
        return f"{maker.partition('.')[0]}(...)"
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is not None and shape is not None:
        return f"{dtype}{list(shape)}"
    if inspect.isfunction(value):
        return value.__name__
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = [
            f"{field.name}={brief(getattr(value, field.name))}"
            for field in dataclasses.fields(value)
            if getattr(value, field.name) != field.default
        ]
        text = f"{type(value).__name__}({', '.join(changed)})"
    else:
        text = repr(value)
    if len(text) <= _LONG:
        return text
    return (
        "..." if isinstance(value, dict | list | tuple) else f"{type(value).__name__}(...)"
    )


_LONG = 120  # characters
