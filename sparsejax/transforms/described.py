"""Decorators of public functions: the repr of their results, and removed options."""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import optax

from sparsejax.errors import ArgumentError
from sparsejax.state.tree import Transformation


_Function = TypeVar("_Function", bound=Callable[..., Any])

_LONG = 120  # characters


def described(function: _Function) -> _Function:
    """Gives the results of a function the call as repr: `zen_sync(axis_name='data')`.

    If the function itself is put into a chain, instead of its result, `init` raises an
    error that says so.
    """
    signature = inspect.signature(function)
    name = function.__name__
    options = signature.parameters.get("options")
    known = {*signature.parameters, *getattr(function, "gone", ()), *_names_of(options)}

    @functools.wraps(function)
    def call(*args, **kwargs):
        if options is not None:
            # optax.inject_hyperparams passes `**options` as an argument named options.
            kwargs |= kwargs.pop("options", {})
            for key in kwargs.keys() - known:
                raise TypeError(f"{name}() got an unexpected keyword argument {key!r}")
        tx = function(*args, **kwargs)
        if not isinstance(tx, Transformation):
            tx = Transformation(tx.init, tx.update)
        given = signature.bind(*args, **kwargs).arguments
        given |= given.pop("options", {})
        tx.text = f"{name}({', '.join(f'{k}={_brief(v)}' for k, v in given.items())})"
        return tx

    def not_called(params):
        del params
        raise ArgumentError(
            f"the chain has the function {name} in it, and not the transformation that it "
            f"makes: call it, {name}(...)."
        )

    # optax.chain reads only `init` before a state is made.
    call.init = not_called  # type: ignore
    return call  # type: ignore


def without(gone: Mapping[str, str]) -> Callable[[_Function], _Function]:
    """Makes a function raise for removed options.

    Args:
        gone: For the name of each removed option, what to write instead.
    """

    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args, **kwargs):
            for name in gone.keys() & kwargs.keys():
                raise ArgumentError(
                    f"{function.__name__} takes no {name}={kwargs[name]!r}: {gone[name]}"
                )
            return function(*args, **kwargs)

        call.gone = gone  # type: ignore
        return call

    return decorate


def _names_of(options):
    """Returns the keys of `**options: Unpack[...]`, which Python itself does not check."""
    if options is None:
        return ()
    (kind,) = typing.get_args(options.annotation)
    return (*kind.__required_keys__, *kind.__optional_keys__)


def _brief(value):
    """Returns the repr of a value without fields at their defaults, short if it is long."""
    if type(value) in (optax.GradientTransformation, optax.GradientTransformationExtraArgs):
        return f"{value.init.__qualname__.partition('.')[0]}(...)"
    text = repr(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: f.default for f in dataclasses.fields(value)}
        changed = {k: v for k in fields if (v := getattr(value, k)) != fields[k]}
        shown = ", ".join(f"{k}={_brief(v)}" for k, v in changed.items())
        text = f"{type(value).__name__}({shown})"
    if len(text) <= _LONG:
        return text
    is_literal = isinstance(value, dict | list | tuple)
    return "..." if is_literal else f"{type(value).__name__}(...)"
