"""Programs that run concurrently with a process' steps, in one thread, in sequence.

A backend may run programs of one thread in the order in which they were dispatched, as
XLA:CPU does, so what is to run beside the steps is dispatched by another thread. Programs
that send have to be in one order on all processes: those of this thread are, if all
processes hand them over in one order. A program of the main thread that sends waits for
them before (`wait`), and steps in between send nothing.
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
    """Hands a program over, and waits until it is dispatched.

    Args:
        program: A compiled program.
        *args: Its arguments, which nothing else may use up.

    Returns:
        What becomes of it: the results, once they are computed.
    """
    if not any(thread.name == __name__ for thread in threading.enumerate()):
        # A daemon: a process that fails does not wait for messages that never come.
        threading.Thread(target=_work, name=__name__, daemon=True).start()
    future, dispatched = Future(), threading.Event()
    _PENDING[:] = [one for one in _PENDING if not one.done()] + [future]
    _QUEUE.put((program, args, future, dispatched))
    dispatched.wait()
    return future


def wait() -> None:
    """Waits until nothing runs in the background; what fails raises where it is used."""
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
