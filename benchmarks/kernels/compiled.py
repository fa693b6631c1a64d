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

import jax


def together(calls: dict[str, tuple]) -> dict[str, Callable]:
    """Compiles functions for their operands.

    Args:
        calls: By name a function and its operands.

    Returns:
        By name what takes nothing and returns the function's result.
    """
    lowered = {name: _lowered(*call) for name, call in calls.items()}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = pool.map(_compiled, lowered.values())
        return {
            name: functools.partial(program, *calls[name][1:])
            for name, program in zip(lowered, compiled, strict=True)
        }


def _lowered(function, *operands):
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
