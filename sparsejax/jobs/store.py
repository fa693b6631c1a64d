"""Exchanges values between the processes of a job without collectives.

It uses the key-value store of the coordination service of `jax.distributed`, which
`jobs.distributed` gives access to. The store works when devices do not: before they are
initialized, if hosts have different numbers of them, and if programs are incompatible.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from sparsejax.errors import JobError
from sparsejax.jobs import distributed
from sparsejax.jobs.texts import listed


_TO_READ = 5.0  # seconds that process 0 waits, before it raises, until others have read
_LONGEST = (1 << 31) - 1  # milliseconds, 24 days
_FIX = (
    "see what that process prints on its host, and whether it runs the same script; if it "
    "needs longer, give all of them a longer timeout."
)

# A counter for each set of processes. They ask their questions in the same order, so a
# number identifies a question.
_asked: dict[tuple[int, ...], Iterator[int]] = {}
_silent: list[int] = []  # processes that did not answer


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of this process in its job.

    Attributes:
        process: The index of this process.
        processes: The number of processes of the job.
        coordinator: The address of the coordinator; None if no job was joined.
    """

    process: int
    processes: int
    coordinator: str | None


def place() -> Place:
    """Returns this process's place; unlike `jax.process_index` it starts no devices."""
    state = distributed.state()
    if state.client is None:
        return Place(0, 1, None)
    return Place(state.process_id, state.num_processes, state.coordinator_address)


def is_waiting() -> bool:
    """Whether leaving the job would wait for a process that did not answer."""
    return bool(_silent)


class Awaited(NamedTuple):
    """What is said of processes that do not come to a question.

    Attributes:
        missed: What they did not do, in words; "" if they did not say the value.
        fix: What to do then, a sentence.
        late: What is printed while this process waits for them; "" for nothing.
        patience: Seconds after which it is printed.
    """

    missed: str = ""
    fix: str = _FIX
    late: str = ""
    patience: float = 0.0

    @contextlib.contextmanager
    def printing(self) -> Iterator[None]:
        """Prints `late` if a block takes longer than `patience`."""
        say = lambda: print(self.late, file=sys.stderr, flush=True)
        timer = threading.Timer(self.patience, say)
        timer.daemon = True
        if self.late:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()


_AWAITED = Awaited()


def of_all(
    what: str,
    value: Any,
    timeout: float,
    hosts: Sequence[str] | Mapping[int, str] | None = None,
    processes: Sequence[int] | None = None,
    awaited: Awaited = _AWAITED,
) -> list:
    """Gathers a value from each process. All of them call it.

    Args:
        what: A description of the value, in words, for messages.
        value: The value of this process, which JSON can encode.
        timeout: Seconds to wait for the others.
        hosts: The host name of each process, by index, if known.
        processes: The indices of the processes, this one included; None for all of the job.
        awaited: What to say of processes that do not come.

    Returns:
        The values, decoded from JSON, in the order of the processes' indices.

    Raises:
        JobError: On every process that called it, if another one does not do so in time,
            or gathers something else.
    """
    here = place()
    everyone = range(here.processes)
    asking = tuple(everyone if processes is None else sorted(processes))
    if len(asking) == 1:
        return [json.loads(json.dumps(value))]
    client = distributed.state().client
    folder = _folder(asking, here.processes)
    client.key_value_set(
        f"{folder}/{here.process}", json.dumps([_host(value), what, value])
    )
    late = None
    try:
        some = {} if len(asking) == here.processes else {"process_ids": list(asking)}
        milliseconds = round(min(max(1, 1e3 * timeout), _LONGEST))
        with awaited.printing():
            client.wait_at_barrier(folder, milliseconds, **some)
    except jax.errors.JaxRuntimeError as error:
        late = error
    entries = dict(client.key_value_dir_get(f"{folder}/"))
    if late is not None:
        _let_all_read(client, folder, here.process, entries)
    said = {int(key.rpartition("/")[2]): json.loads(text) for key, text in entries.items()}
    if late is None and len(said) == len(asking):
        _check_asked({process: asked for process, (_, asked, _) in said.items()})
        return [said[process][2] for process in asking]
    missing = [process for process in asking if process not in said]
    name = lambda process: f"process {process}" + (f" on {hosts[process]}" if hosts else "")
    who = listed([name(process) for process in missing]) or "one of the processes"
    came = listed([f"process {p} on {said[p][0]}" for p in sorted(said) if said[p][0]])
    _silent.extend(missing or [-1])
    is_late = "DEADLINE" in str(late)
    if is_late and not missing:
        raise JobError(
            f"all {len(asking)} processes said {what}, but one of them later than another "
            f"waited ({came}): give all of them a longer timeout."
        ) from late
    when = f"within {timeout:g} s" if is_late else "before it ended"
    raise JobError(
        f"{who} of {len(asking)} did not {awaited.missed or f'say {what}'} {when}"
        + (f" ({came} did): " if came else ": ")
        + awaited.fix
    ) from late


def _folder(asking: tuple[int, ...], of: int) -> str:
    """Returns the key prefix in the store for the next question of these processes."""
    number = next(_asked.setdefault(asking, itertools.count(1)))
    if len(asking) == of:
        return f"sparsejax/{number}"
    some = hashlib.blake2b(repr(asking).encode(), digest_size=8).hexdigest()
    return f"sparsejax/of {some}/{number}"


def _let_all_read(client, folder: str, process: int, entries: dict[str, str]) -> None:
    """Waits on process 0 until the others that answered have read which did not.

    When process 0 exits, so does the coordinator, and then each process that still uses it.
    """
    if process > 0:
        client.key_value_set(f"{folder} read/{process}", "")
        return
    end = time.monotonic() + _TO_READ
    for key in entries:
        other = key.rpartition("/")[2]
        left = max(1, round(1e3 * (end - time.monotonic())))
        if other != "0":
            try:
                client.blocking_key_value_get(f"{folder} read/{other}", left)
            except jax.errors.JaxRuntimeError:
                pass  # It has exited, or joined the job later.


def _check_asked(asked: dict[int, str]) -> None:
    """Raises if processes are at different places of a script, or run different scripts."""
    first = min(asked)
    for process, what in sorted(asked.items()):
        if what != asked[first]:
            raise JobError(
                f"process {first} said {asked[first]} where process {process} said {what}: "
                "call sparsejax.init, trainer.init, trainer.step, sparsejax.save, check_job"
                " and doctor in the same order on all processes, in the same script."
            )


def _host(value):
    return value.get("host", "") if isinstance(value, dict) else ""
