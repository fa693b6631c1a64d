"""What one process cannot read or write all refuse, so that none waits, or goes on.

Each process of a job reads its own part, of files that another may have written, or of
copies on its own host, and writes its own part. Then each says by the coordination
service's store whether it could.
"""

import socket
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from sparsejax.errors import CheckpointError
from sparsejax.jobs import store


_T = TypeVar("_T")

# Seconds that a process waits for others which have more to do, or a slower disk.
_TO_DO = 3600.0


def on_all(what: str, do: Callable[[], _T]) -> _T:
    """What each process returns that does its part, where all can; all processes call it.

    Args:
        what: What is asked, in words, for messages.
        do: Does this process's part. It may wait for another one only for a limited time;
            JAX's error, if that one does not come, is not reported as the cause.

    Raises:
        CheckpointError: On all processes, if one of them cannot.
        JobError: A process does not say in time whether it can.
    """
    if store.place().processes == 1:
        return do()
    failed: Exception | None = None
    part: Any = None
    try:
        part = do()
    except Exception as error:  # of any kind: the others would wait
        failed = error
    why = None if failed is None else str(failed) or type(failed).__name__
    follows = isinstance(failed, jax.errors.JaxRuntimeError)
    own = {"host": socket.gethostname(), "why": why, "follows": follows}
    answers = store.of_all(what, own, _TO_DO)
    wrong = [process for process, one in enumerate(answers) if one["why"] is not None]
    if not wrong:
        return part
    cause = min(wrong, key=lambda process: (answers[process]["follows"], process))
    first = answers[cause]
    alike = all(one["why"] == first["why"] for one in answers)
    is_own = not isinstance(failed, CheckpointError) and follows <= first["follows"]
    if failed is not None and (alike or is_own):
        raise failed
    who = f"process {cause} on host {first['host']}"
    raise CheckpointError(f"{who}: {first['why']}") from failed
