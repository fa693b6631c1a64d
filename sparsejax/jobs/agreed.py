"""Values on which processes have agreed: each is compared once, when it is new.

Shapes of batches are an example: they decide what is compiled, and are the same in nearly
every step. A process compares a value only when it is new to it, so afterwards nothing is
sent. The number of the call is compared with it: what is new to two processes in different
calls differs in both. Values that all know already, in another order, are not noticed.

If a value is new to this process and not to another, the other compares nothing, and waits
in a collective. Then this one raises when its time is over, and says before what it waits
for: the library of a collective may abort the other, and with it this process. After that
processes are out of step by one call, and cannot go on.
"""

import collections
from collections.abc import Callable, Hashable, Mapping, Sequence

from sparsejax.errors import ArgumentError, JobError, message
from sparsejax.jobs import store
from sparsejax.jobs.agreement import disagreements
from sparsejax.jobs.texts import listed


_PATIENCE = 10.0  # seconds, after which a process prints what it waits for


class Agreed:
    """Values on which processes have agreed.

    Args:
        what: A plural noun for what is compared, for messages.
        fix: What to do if values differ, a sentence.
    """

    def __init__(self, what: str, fix: str):
        self._what, self._fix = what, fix
        self._known: set[Hashable] = set()
        self._calls: collections.Counter[tuple[int, ...]] = collections.Counter()

    def check(
        self,
        call: str,
        key: Hashable,
        values: Callable[[], Mapping[str, str]],
        processes: Sequence[int],
        timeout: float,
    ) -> None:
        """Compares values with those of other processes, if they are new to this one.

        Args:
            call: The public function, for messages.
            key: What identifies the values in this process.
            values: Returns the values as text, by name; only called if the key is new.
            processes: The indices of the processes of the call. Nothing is compared if
                there is one, or this one is not among them.
            timeout: Seconds to wait for the others.

        Raises:
            ArgumentError: On all processes, if values that are new to all of them differ.
            JobError: The values are new to this process alone, or another one does not come
                in time. The process cannot go on.
        """
        here = store.place()
        if here.processes == 1 or len(processes) == 1 or here.process not in processes:
            return
        asking = tuple(processes)
        self._calls[asking] += 1
        if (key := (asking, key)) in self._known:
            return
        texts = dict(values())
        same = asking, tuple(sorted(texts.items()))
        if same not in self._known:
            number = {"the number of the call": str(self._calls[asking])}
            self._compare(call, texts, number, processes, timeout)
        self._known |= {key, same}

    def _compare(self, call, texts, number, processes, timeout):
        topic = self._what
        shown = listed([f"{name}: {text}" for name, text in texts.items()], 4) or "none"
        new = f"process {store.place().process} gives {call} new {topic}, {shown}"
        # At first all have something new, and some may still read their data.
        is_first, awaited = not self._known, None
        if not is_first:
            late = f"sparsejax: {new}, and waits for other processes to do so."
            missed = f"give {call} new {topic}"
            awaited = store.Awaited(missed, self._fix, late, _PATIENCE)
        given = {topic: {**texts, **number}}
        try:
            wrong = disagreements(call, given, {}, processes, timeout, awaited=awaited)
        except JobError as error:
            if is_first:
                raise
            raise JobError(f"{new}, and not all others did: {message(error)}") from error
        if wrong:
            raise ArgumentError(
                f"{call}: {topic} differ between processes:\n"
                + "\n".join([*(f"* {one}" for one in wrong), self._fix])
            )
