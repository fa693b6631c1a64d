"""What one process cannot read is refused by all, so that no other waits, or goes on.

Each process of a job reads its own part, of files that another may have written, or of
copies on its own host. Nothing of it needs the others until all have read: then each says
by the coordination service's store whether it could.
"""

import socket
from collections.abc import Callable
from typing import Any, TypeVar

from sparsejax.errors import CheckpointError
from sparsejax.wire.job import store


_T = TypeVar("_T")

# Seconds that a process waits for others which read more, or from a slower disk.
_TO_READ = 3600.0


def on_all(what: str, read: Callable[[], _T]) -> _T:
    """What each process reads, where all can; all processes call it.

    Args:
        what: What is asked, in words, for messages.
        read: Reads this process's part, without waiting for another.

    Raises:
        CheckpointError: On all processes, if one of them cannot.
        JobError: A process does not say in time whether it can.
    """
    if store.place().processes == 1:
        return read()
    failed: Exception | None = None
    part: Any = None
    try:
        part = read()
    except Exception as error:  # of any kind: the others would wait
        failed = error
    why = None if failed is None else str(failed) or type(failed).__name__
    told = store.of_all(what, {"host": socket.gethostname(), "why": why}, _TO_READ)
    wrong = [process for process, one in enumerate(told) if one["why"] is not None]
    if not wrong:
        return part
    first = told[wrong[0]]
    alike = all(one["why"] == first["why"] for one in told)
    if failed is not None and (alike or not isinstance(failed, CheckpointError)):
        raise failed
    who = f"process {wrong[0]} on host {first['host']}"
    raise CheckpointError(f"{who}: {first['why']}") from failed
