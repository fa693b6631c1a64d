"""Programs compiled side by side.

XLA takes seconds for a program on a GPU, and a benchmark has a hundred. It lets go of
Python's lock meanwhile, so threads compile as many at a time as there are processors;
tracing, which holds it, is done before. A program that cannot be had raises when it is
called, so that one which fails does not stop the others.
"""

import concurrent.futures
import functools
import os
from collections.abc import Callable
from typing import Any

import jax


def together(calls: dict[str, tuple]) -> dict[str, Callable]:
    """Compiles functions for their operands.

    Args:
        calls: By name a function and its operands.

    Returns:
        By name what takes nothing and returns the function's result.
    """
    return all_of({name: (lowered(*call), call[1:]) for name, call in calls.items()})


def all_of(programs: dict[Any, tuple]) -> dict[Any, Callable]:
    """Compiles what is lowered, by name beside its operands, as `together`."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        done = pool.map(_compiled, [one for one, _ in programs.values()])
        return {
            name: functools.partial(program, *operands)
            for (name, (_, operands)), program in zip(programs.items(), done, strict=True)
        }


def lowered(function: Callable, *operands: Any) -> Any:
    """A function, lowered for its operands, or what it raises then."""
    try:
        return jax.jit(function).lower(*operands)
    except Exception as error:
        return error


def _compiled(lowered):
    try:
        return _raises(lowered) if isinstance(lowered, Exception) else lowered.compile()
    except Exception as error:
        return _raises(error)


def _raises(error):
    def program(*_):
        raise error

    return program
