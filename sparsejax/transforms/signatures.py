"""Signatures that say which options a function hands on.

`help`, editors and `optax.inject_hyperparams` read a function's signature, and the last one
takes `**options` for an argument of that name.
"""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar


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
