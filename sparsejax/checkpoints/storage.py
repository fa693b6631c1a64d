"""Writes a checkpoint under another name, reads it back, and renames it: all or nothing.

The folder has the files that orbax writes: `state` with the arrays, `about/metadata` with
the JSON, and orbax's own `_CHECKPOINT_METADATA`. It gets the requested name only when it
was read back. So a crash, a full disk or an incomplete write leaves nothing under that
name. To replace an old checkpoint takes two renames, between which both are complete under
other names.

In a bucket nothing can be renamed: a checkpoint is written under its own name, and removed
if it cannot be read back.
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


# Seconds within which each host sees the files of another: a network file system may cache
# for a while that a folder does not exist.
_SEEN = 60.0

# Two threads that write the same folder would remove each other's files.
_ONE_AT_A_TIME = threading.Lock()


def write(
    folder: Any, about: dict[str, Any], part: Part, arrays: Sequence[Any], replace: bool
) -> None:
    """Writes a checkpoint. All processes call it, and if one fails, all raise.

    Args:
        folder: The folder of the checkpoint.
        about: The JSON.
        part: The description of the state, as in the JSON.
        arrays: The arrays, in the order of their numbers.
        replace: Whether it may replace an existing checkpoint.
    """
    writing.orbax()
    with _ONE_AT_A_TIME:
        is_there = together.on_all(
            "whether it can save there", lambda: _is_there(folder, replace)
        )
        try:
            _write(folder, about, part, arrays, is_there)
        except Exception as error:  # orbax and TensorStore raise errors of many types
            kept = "the one before is kept" if is_there else "nothing of it is kept"
            raise CheckpointError(
                f"the checkpoint could not be written to {folder}, and {kept}: "
                f"{reading.line(error)}."
            ) from error


def _is_there(folder, replace):
    """Whether a checkpoint exists; raises if it must not, or cannot, be replaced."""
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
    """Calls a function on process 0, while the others wait; if it raises, all raise."""
    together.on_all(what, lambda: function() if jax.process_index() == 0 else None)


def _cleaned(folder):
    """Removes the folders that an interrupted save has left, and finishes its renames."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    whole = folders.whole(folder)
    if whole != folder:
        whole.rename(folder)
    for old in (*folders.unfinished(folder), beside(folder, LAST)):
        folders.removed(old)


def _check(folder, about, part, arrays):
    """Raises unless this process can read back the JSON, and the chunks that it wrote."""
    text = _seen(folder)
    is_first = jax.process_index() == 0  # the process that wrote the JSON
    if is_first and records.checksum(json.loads(text)) != records.checksum(about):
        raise CheckpointError("its description says something else than was written")
    reading.check(folder, arrays_of(part), arrays)


def _seen(folder):
    """Returns the bytes of the JSON file, as soon as this host sees it."""
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
    """Gives a checkpoint its name, and removes the old one that had this name.

    If another program has made a folder of that name meanwhile, the file system refuses.
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
