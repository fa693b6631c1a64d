"""Values on which processes have agreed: each is compared once, when it is new.

Shapes of batches are an example: they decide what is compiled, and are the same in nearly
every step. A process compares a value only when it is new to it, so afterwards nothing is
sent. If it is new to this process and not to another, the other compares nothing, and waits
in a collective. Then this one raises when its time is over, and says before what it waits
for: the library of a collective may abort the other, and with it this process.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

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
            ArgumentError: On all processes, if values differ.
            JobError: Another process does not compare its values in time.
        """
        here = store.place()
        if here.processes == 1 or len(processes) == 1 or here.process not in processes:
            return
        if (key := (tuple(processes), key)) in self._known:
            return
        texts = dict(values())
        same = tuple(processes), tuple(sorted(texts.items()))
        if same not in self._known:
            self._compare(call, texts, processes, timeout)
        self._known |= {key, same}

    def _compare(self, call, texts, processes, timeout):
        topic = self._what
        shown = listed([f"{name}: {text}" for name, text in texts.items()], 4) or "none"
        new = f"process {store.place().process} gives {call} new {topic}, {shown}"
        with self._printing(f"sparsejax: {new}, and waits for other processes to do so."):
            try:
                wrong = disagreements(call, {topic: texts}, {}, processes, timeout)
            except JobError as error:
                if not self._known:
                    raise
                raise JobError(
                    f"{new}, and not all others did: {message(error)} {self._fix}"
                ) from error
        if wrong:
            raise ArgumentError(
                f"{call}: {topic} differ between processes:\n"
                + "\n".join([*(f"* {one}" for one in wrong), self._fix])
            )

    @contextlib.contextmanager
    def _printing(self, text: str) -> Iterator[None]:
        """Prints a text if a block takes long; not at first, when hosts read their data."""
        if not self._known:
            yield
            return
        late = threading.Timer(_PATIENCE, lambda: print(text, file=sys.stderr, flush=True))
        late.daemon = True
        late.start()
        try:
            yield
        finally:
            late.cancel()
