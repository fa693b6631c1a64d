"""What the processes of a job tell each other outside of collectives.

The coordination service of `jax.distributed` has a store of texts. It works when devices do
not: before they are counted, where hosts have different numbers of them, and where programs
would not fit together. JAX has no public name for it; this file alone reaches for it.
"""

import dataclasses
import itertools
import json
import time
from typing import Any

import jax
from jax._src import distributed

from sparsejax.errors import JobError


_TO_READ = 5.0  # seconds for which process 0 waits for those that read why it ends

# All processes ask in the same order, so that a number tells one question from the next.
_asked = itertools.count(1)
_silent: list[int] = []  # processes that did not answer


@dataclasses.dataclass(frozen=True)
class Place:
    """Where this process stands in its job.

    Attributes:
        process: Its number.
        processes: How many processes the job has.
        coordinator: The address of the coordinator, or None where there is no job.
    """

    process: int
    processes: int
    coordinator: str | None


def place() -> Place:
    """This process's place; it does not start the devices, as `jax.process_index` does."""
    state = distributed.global_state
    if state.client is None:
        return Place(0, 1, None)
    return Place(state.process_id, state.num_processes, state.coordinator_address)


def is_waiting() -> bool:
    """Whether saying good-bye to the job would wait for a process that said nothing."""
    return bool(_silent)


def of_all(what: str, value: Any, timeout: float, hosts: list[str] | None = None) -> list:
    """What each process says, by its number; alone, what this one says.

    Args:
        what: What is asked, in words, for the message.
        value: What this process says; it must have a form in JSON.
        timeout: Seconds to wait for the others.
        hosts: The names of the hosts of all processes, where they are known.

    Raises:
        JobError: On every process that is there, if one of them does not come in time, or
            asks something else.
    """
    here = place()
    if here.processes == 1:
        return [json.loads(json.dumps(value))]
    client: Any = distributed.global_state.client
    folder = f"sparsejax/{next(_asked)}"
    client.key_value_set(
        f"{folder}/{here.process}", json.dumps([_host(value), what, value])
    )
    late = None
    try:
        client.wait_at_barrier(folder, max(1, round(1e3 * timeout)))
    except jax.errors.JaxRuntimeError as error:
        late = error
    told = dict(client.key_value_dir_get(f"{folder}/"))
    if late is not None:
        _let_all_read(client, folder, here.process, told)
    said = {int(key.rpartition("/")[2]): json.loads(text) for key, text in told.items()}
    if late is None and len(said) == here.processes:
        _check_asked({process: asked for process, (_, asked, _) in said.items()})
        return [said[process][2] for process in range(here.processes)]
    missing = [process for process in range(here.processes) if process not in said]
    name = lambda process: f"process {process}" + (f" on {hosts[process]}" if hosts else "")
    who = _list([name(process) for process in missing]) or "one of the processes"
    came = _list([f"process {p} on {said[p][0]}" for p in sorted(said) if said[p][0]])
    _silent.extend(missing or [-1])
    when = f"within {timeout:g} s" if "DEADLINE" in str(late) else "before it ended"
    raise JobError(
        f"{who} of {here.processes} did not say {what} {when}"
        + (f" ({came} did)" if came else "")
        + ": see what that process prints on its host, and whether it runs the same script."
    ) from late


def _let_all_read(client, folder: str, process: int, told: dict[str, str]) -> None:
    """Waits on process 0 until the others that are there know who is not.

    With process 0 ends the coordinator, and with it each process that still asks it.
    """
    if process > 0:
        client.key_value_set(f"{folder} read/{process}", "")
        return
    end = time.monotonic() + _TO_READ
    for key in told:
        other = key.rpartition("/")[2]
        left = max(1, round(1e3 * (end - time.monotonic())))
        if other != "0":
            try:
                client.blocking_key_value_get(f"{folder} read/{other}", left)
            except jax.errors.JaxRuntimeError:
                pass  # It has ended, or joined the job later.


def _check_asked(asked: dict[int, str]) -> None:
    """Raises where processes are at other places of a script, or run other scripts."""
    for process, what in sorted(asked.items()):
        if what != asked[0]:
            raise JobError(
                f"process 0 said {asked[0]} where process {process} said {what}: call "
                "check_job and doctor in the same order on all processes, in the same "
                "script."
            )


def _host(value):
    return value.get("host", "") if isinstance(value, dict) else ""


def _list(names, most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
