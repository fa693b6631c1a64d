"""Compares values between processes, topic by topic, and names those that differ.

The processes exchange a hash of each topic through the coordination service. Only for a
topic whose hashes differ, the first process sends all of its values, and each other process
those that differ from them. So if all agree, a process sends about a hundred bytes,
whatever the size of the model; and all processes report the same sentences.
"""

import hashlib
import json
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sparsejax.jobs import store
from sparsejax.jobs.texts import listed


Topics = Mapping[str, Mapping[str, str]]  # the values of each topic by name

_ABSENT = "absent"
# Seconds to wait for processes that come to the same call; some may first read their data.
TIMEOUT = 300.0

_MOST = 5  # sentences about a topic
_LONG = 160  # characters of a value


def processes_of(devices: Iterable[object]) -> tuple[int, ...]:
    """Returns the sorted indices of the processes that have these devices."""
    return tuple(sorted({getattr(device, "process_index", 0) for device in devices}))


class Remedy(NamedTuple):
    """What to do if the values of a topic differ.

    Attributes:
        fix: A sentence; "" for none.
        causes: Topics whose differences explain those of this one, which is then left out.
    """

    fix: str = ""
    causes: Collection[str] = ()


_NO_REMEDY = Remedy()


def octets(x: Any) -> np.ndarray:
    """Returns a view of an array as bytes: not all dtypes support the buffer protocol."""
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def hashed(x: Any) -> str:
    """Returns a hash of the numbers of an array, of a text, or of a dict, as text."""
    if isinstance(x, Mapping):
        x = json.dumps(x, sort_keys=True)
    data = x.encode() if isinstance(x, str) else octets(x).data
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def disagreements(
    call: str,
    topics: Topics,
    remedies: Mapping[str, Remedy],
    processes: Sequence[int],
    timeout: float,
    why: str = "",
    awaited: store.Awaited | None = None,
) -> list[str]:
    """Compares values between processes. All of them call it.

    Args:
        call: The call in which they compare them, for messages.
        topics: The values of this process, by topic and name.
        remedies: What to do if values of a topic differ, by topic.
        processes: The indices of the processes to compare, this one included.
        timeout: Seconds to wait for the others.
        why: The reason why this process has no values, or "".
        awaited: What to say of processes that do not answer; None if they did not reach the
            call.

    Returns:
        A sentence for each difference, the same list on all processes.

    Raises:
        JobError: A process does not answer in time, or compares something else.
    """
    hashes = {topic: hashed(values) for topic, values in topics.items()}
    own = {"host": socket.gethostname(), "why": why, "hashes": hashes}
    what, awaited = f"what it gives {call}", awaited or store.Awaited(f"reach {call}")
    answers = store.of_all(what, own, timeout, processes=processes, awaited=awaited)
    hosts = {p: one["host"] for p, one in zip(processes, answers, strict=True)}
    failed = [
        f"{who([p], hosts)} cannot go on: {one['why']}"
        for p, one in zip(processes, answers, strict=True)
        if one["why"]
    ]
    if failed:
        return failed
    names = dict.fromkeys(topic for one in answers for topic in one["hashes"])
    differing = [
        topic for topic in names if len({one["hashes"].get(topic) for one in answers}) > 1
    ]
    remedy = lambda topic: remedies.get(topic, _NO_REMEDY)
    differing = [topic for topic in differing if not {*remedy(topic).causes} & {*differing}]
    if not differing:
        return []
    fixes = {topic: remedy(topic).fix for topic in differing}
    return _in_full(what, differing, topics, fixes, hosts, timeout)


def _in_full(what, differing, topics, fixes, hosts, timeout):
    """Exchanges the values of topics that differ, and returns sentences about them."""
    processes = list(hosts)
    mine = {topic: dict(topics.get(topic, {})) for topic in differing}
    is_first = store.place().process == processes[0]
    asked = f"{what}, in full"
    first = store.of_all(asked, mine if is_first else None, timeout, hosts, processes)[0]
    others = {
        topic: {
            name: mine[topic].get(name, _ABSENT)
            for name in {**first[topic], **mine[topic]}
            if mine[topic].get(name) != first[topic].get(name)
        }
        for topic in differing
    }
    asked = f"{what}, where it differs"
    answers = store.of_all(asked, others, timeout, hosts, processes)
    by_process = dict(zip(processes, answers, strict=True))
    found = []
    for topic in differing:
        names = dict.fromkeys(name for one in answers for name in one[topic])
        sentences = []
        for name in names:
            common = first[topic].get(name, _ABSENT)
            values = {p: one[topic].get(name, common) for p, one in by_process.items()}
            texts = differences(name, values, hosts)
            sentences += [f"{text}. {fixes[topic]}".strip() for text in texts]
        more = len(sentences) - _MOST
        found += sentences[:_MOST]
        found += [f"and {more} more of the {topic}."] if more > 0 else []
    return found


def differences(
    what: str, values: Mapping[int, str], hosts: Mapping[int, str] | Sequence[str]
) -> list[str]:
    """Returns a list of one sentence that says which process has which value.

    The list is empty if all values are equal.

    Args:
        what: The name of the value.
        values: The value of each process, by index.
        hosts: The host name of each process, by index.
    """
    groups: dict[str, list[int]] = {}
    for process, value in values.items():
        groups.setdefault(value, []).append(process)
    if len(groups) == 1:
        return []
    shared = _common([*map(str, groups)])
    parts = [
        f"{_cut(value, shared)} on {who(group, hosts)}" for value, group in groups.items()
    ]
    return [f"{what} is {', and '.join(parts)}"]


def who(
    processes: Sequence[int], hosts: Mapping[int, str] | Sequence[str], most: int = 3
) -> str:
    """Returns a list of processes as text, each with its host."""
    return listed([f"host {hosts[i]} (process {i})" for i in processes], most)


def _cut(value, shared):
    """Returns a value as text, cut to the part around the first difference if long."""
    text = str(value)
    begin = max(0, shared - _LONG // 2) if len(text) > _LONG else 0
    before = "... " if begin else ""
    after = " ..." if len(text) > begin + _LONG else ""
    return f"{before}{text[begin : begin + _LONG]}{after}"


def _common(texts):
    """Returns the length of the common prefix of texts."""
    letters = enumerate(zip(*texts, strict=False))
    return next((at for at, each in letters if len({*each}) > 1), min(map(len, texts)))
