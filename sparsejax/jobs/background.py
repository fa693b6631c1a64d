"""Runs programs in a background thread, in sequence, concurrently with a process's steps.

A backend may run the programs of one thread in the order in which they were dispatched, as
XLA:CPU does, so a program that is to overlap with the steps is dispatched by another
thread. Programs with collectives must run in the same order on all processes: those of this
thread do, if all processes submit them in the same order. The main thread calls `wait`
before its own programs with collectives; the steps in between have none.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jax


_QUEUE: queue.SimpleQueue = queue.SimpleQueue()
_PENDING: list[Future] = []


def submit(program: Callable[..., Any], *args: Any) -> Future:
    """Submits a program to the thread, and waits until it is dispatched.

    Args:
        program: A compiled program.
        *args: Its arguments, which no other program may be given as donated.

    Returns:
        A future of the results, which is done when they are computed.
    """
    if not any(thread.name == __name__ for thread in threading.enumerate()):
        # A daemon, so that a process that fails exits without waiting for a collective.
        threading.Thread(target=_work, name=__name__, daemon=True).start()
    future, dispatched = Future(), threading.Event()
    _PENDING[:] = [one for one in _PENDING if not one.done()] + [future]
    _QUEUE.put((program, args, future, dispatched))
    dispatched.wait()
    return future


def wait() -> None:
    """Waits until no program runs in the background; a failure raises from its future."""
    for future in list(_PENDING):
        future.exception()
    _PENDING.clear()


def _work():
    while True:
        program, args, future, dispatched = _QUEUE.get()
        try:
            results = program(*args)
            dispatched.set()
            future.set_result(jax.block_until_ready(results))
        except BaseException as error:
            future.set_exception(error)
        finally:
            dispatched.set()
        del program, args, future
