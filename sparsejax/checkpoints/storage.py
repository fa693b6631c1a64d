"""How a checkpoint gets its name: written whole, and read back, or not at all.

A folder has what orbax writes: `state` with the arrays, `about/metadata` with the JSON, and
orbax's own `_CHECKPOINT_METADATA`. It is written under another name, read back, and only
then renamed. So a crash, a full disk, or a write of which something is missing leaves
nothing under the name that was asked for. One that takes the place of another does so by
two renames: in between one of the two is whole at any time.

In a bucket, where nothing is renamed, it is written under its name, and removed where it
cannot be read back.
"""

import contextlib
import json
import pathlib
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax

from sparsejax.checkpoints import folders, reading, records, together, writing
from sparsejax.checkpoints.description import Part, arrays_of
from sparsejax.checkpoints.folders import LAST, NEXT, beside
from sparsejax.errors import CheckpointError


# Seconds after which each host sees what another one has written: a network's file system
# remembers for a while that there was no such folder.
_SEEN = 60.0

# Two that write the same folder would remove each other's files.
_ONE_AT_A_TIME = threading.Lock()


def write(
    folder: Any, about: dict[str, Any], part: Part, arrays: Sequence[Any], replace: bool
) -> None:
    """Writes a checkpoint; all processes call it, and where one fails, all raise.

    Args:
        folder: Where.
        about: The JSON.
        part: The description of the state, which the JSON has.
        arrays: The arrays, by their numbers.
        replace: Whether it may take the place of an existing one.
    """
    writing.orbax()
    with _ONE_AT_A_TIME:
        is_there = together.on_all(
            "whether it can save there", lambda: _is_there(folder, replace)
        )
        try:
            _write(folder, about, part, arrays, is_there)
        except Exception as error:  # of any library that has a part in it
            kept = "the one before is kept" if is_there else "nothing of it is kept"
            raise CheckpointError(
                f"the checkpoint could not be written to {folder}, and {kept}: "
                f"{reading.line(error)}."
            ) from error


def _is_there(folder, replace):
    """Whether a checkpoint exists, whose place another may take."""
    with folders.in_words(folder):
        there = folders.whole(folder)
        if not there.exists() and not folders.is_link(there):
            return False
        if not folders.is_checkpoint(there):
            why = folders.missing(folder)
            raise CheckpointError(f"{why} It is left as it is: name another.")
        if not replace:
            raise CheckpointError(
                f"{folder} already exists: give each checkpoint a folder of its own, or "
                "let it take the place of that one, sparsejax.save(path, state, "
                "replace=True)."
            )
        if _is_bucket(folder):
            raise CheckpointError(
                f"{folder} already exists, and in a bucket no folder takes the place of "
                "another at once: give each checkpoint a folder of its own."
            )
        return True


def _is_bucket(folder):
    return not isinstance(folder, pathlib.Path)


def _write(folder, about, part, arrays, is_there):
    to = folder if _is_bucket(folder) else beside(folder, NEXT)

    def save():
        writing.write(to, about, arrays)
        _check(to, about, part, arrays)

    try:
        _by_first("whether it has made room", lambda: _cleaned(folder))
        together.on_all("whether it has written its part, and can read it", save)
        _by_first(
            "whether it has named what is written", lambda: _named(folder, to, is_there)
        )
    except Exception:
        if jax.process_index() == 0:
            with contextlib.suppress(OSError):
                _cleaned(folder)
                folders.removed(to)
        raise


def _by_first(what, function):
    """What process 0 does, before all go on."""
    together.on_all(what, lambda: function() if jax.process_index() == 0 else None)


def _cleaned(folder):
    """Removes what a save that was cut short has left of a checkpoint."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    whole = folders.whole(folder)
    if whole != folder:
        whole.rename(folder)
    for old in (*folders.unfinished(folder), beside(folder, LAST)):
        folders.removed(old)


def _check(folder, about, part, arrays):
    """Raises unless this process can read what it has given to be written."""
    text = _seen(folder)
    is_first = jax.process_index() == 0  # whose description was written
    if is_first and records.checksum(json.loads(text)) != records.checksum(about):
        raise CheckpointError("its description says something else than was written")
    reading.check(folder, arrays_of(part), arrays)


def _seen(folder):
    """The text of the description, when this host sees what process 0 has written."""
    end = time.monotonic() + (_SEEN if jax.process_count() > 1 else 0)
    while True:
        try:
            return folders.record(folder)[1]
        except OSError as error:
            if time.monotonic() >= end:
                raise CheckpointError(
                    f"what was written is not there: {reading.line(error)}. Of several "
                    "processes all need the same path, of folders that all of them see"
                ) from error
        time.sleep(1)


def _named(folder, to, is_there):
    """What was written gets its name, and takes the place of what had it at first.

    Where somebody else has given that name in the meantime the system refuses it.
    """
    if to == folder:
        return
    last = beside(folder, LAST)
    if is_there:
        folder.rename(last)
    try:
        to.rename(folder)
    except OSError:
        if is_there:
            last.rename(folder)
        raise
    folders.removed(last)
