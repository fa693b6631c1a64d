"""Raises on all processes if one cannot read or write its part, or if parts do not fit.

Each process of a job reads and writes its own part, of files that another process may have
written, or of copies on its own host. Then each reports, by the store of the coordination
service, whether it could, so that none waits for another.
"""

import socket
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax

from sparsejax.errors import CheckpointError
from sparsejax.jobs import store
from sparsejax.jobs.agreement import hashed, who


_T = TypeVar("_T")

# Seconds to wait for processes that have more to do, or a slower disk.
_TO_DO = 3600.0
_PATIENCE = 60.0  # seconds, after which a process prints what it waits for


def on_all(what: str, do: Callable[[], _T]) -> _T:
    """Calls a function on all processes, and raises on all if it raises on one.

    All processes call it.

    Args:
        what: The question whether it succeeded, in words, for messages.
        do: Does this process's part. It may wait for another process only for a limited
            time. A timeout then raises an error of JAX, which is not reported as the cause
            if there is another.

    Returns:
        The result of `do` on this process.

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
    except Exception as error:  # all types, because the other processes would wait
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
    raise CheckpointError(
        f"process {cause} on host {first['host']}: {first['why']}"
    ) from failed


def all_call(call: str) -> None:
    """Waits until all processes call a public function. All of them call it.

    Args:
        call: The function. What is waited for is printed after a minute.

    Raises:
        JobError: A process does not come in time.
    """
    if store.place().processes == 1:
        return
    fix = (
        "all processes call it, with one path. If it is called under "
        "`if jax.process_index() == 0`, call it on all."
    )
    here = f"process {store.place().process}"
    late = f"sparsejax: {here} waits in {call} for other processes to call it: {fix}"
    awaited = store.Awaited(f"call {call}", fix, late, _PATIENCE)
    own = {"host": socket.gethostname()}
    store.of_all(f"that it calls {call}", own, _TO_DO, awaited=awaited)


class Same(NamedTuple):
    """A text that must be equal on all processes, or a dict of texts.

    Attributes:
        what: What is compared, in words, for messages.
        own: The text of this process; or texts by name, of which a message names one.
        shown: What messages show of a text.
        fix: What to do if it differs.
    """

    what: str
    own: str | dict[str, str]
    shown: str
    fix: str


def check_equal(*texts: Same) -> None:
    """Raises on all processes unless they give equal texts. All processes call it.

    Args:
        *texts: The texts, which are compared in this order.

    Raises:
        CheckpointError: A text differs.
        JobError: A process does not come in time.
    """
    if store.place().processes == 1:
        return
    what = " and ".join(text.what for text in texts)
    # Texts by name may be many: at first their hash is compared.
    owns = [own if isinstance(own, str) else hashed(own) for _, own, *_ in texts]
    pairs = [(own, text.shown) for own, text in zip(owns, texts, strict=True)]
    given = {"host": socket.gethostname(), "texts": pairs}
    answers = store.of_all(what, given, _TO_DO)
    hosts = [one["host"] for one in answers]
    for at, text in enumerate(texts):
        each = [one["texts"][at] for one in answers]
        (first, first_shown), *_ = each
        for process, (own, shown) in enumerate(each):
            if own == first:
                continue
            what, there, here = text.what, first_shown, shown
            if isinstance(text.own, dict):
                named = store.of_all(f"{what} by name", text.own, _TO_DO)
                first, own = named[0], named[process]
                name = next(n for n in [*first, *own] if first.get(n) != own.get(n))
                there, here = (of.get(name, "missing") for of in (first, own))
                what = f"{what} {name!r}"
            raise CheckpointError(
                f"{what} differs between processes: on {who([0], hosts)} it is {there}, "
                f"and on {who([process], hosts)} {here}. {text.fix}"
            )
