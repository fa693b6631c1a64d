"""`sparsejax.save`."""

import json
import os
from typing import Any, NamedTuple

import jax
import numpy as np

from sparsejax.checkpoints import folders, reading, records, storage, together
from sparsejax.checkpoints.description import (
    Value,
    arrays_of,
    described,
    is_key,
    leaves,
    ranks_of,
)
from sparsejax.errors import ArgumentError
from sparsejax.jobs import agreement, store
from sparsejax.state import tree
from sparsejax.state.per_rank import check_whole


_LONG = 100  # characters of a text that processes compare as it is


def save(
    path: str | os.PathLike[str],
    state: Any,
    *,
    about: records.About | None = None,
    replace: bool = False,
) -> None:
    """Writes a state into a folder, for `sparsejax.restore`.

    It is written whole or not at all: all of it is read back and compared before the folder
    gets its name, and a crash or a full disk leaves the path as it was. In a job of several
    processes all call it, with a path that all of them see. Each writes its shards; process
    0 alone writes leaves that are no global arrays, such as NumPy arrays and PRNG keys, and
    all raise if another process has other numbers there, or another tree. If one process
    cannot write or read its part, all raise, at the latest within minutes. It needs orbax:
    `pip install 'sparsejax[checkpoint]'`.

    Args:
        path: A folder that does not exist yet, such as one for each step. Its name may have
            at most 219 bytes, and no part of the path may have a backslash.
        state: The state: a `sparsejax.TrainState`, an optimizer's state, or any tree of
            arrays, Python numbers and texts.
        about: What the state belongs to, such as the data or a seed, as texts and numbers,
            the same on all processes. `restore` compares it.
        replace: Whether to replace an existing checkpoint. The old one is kept until the
            new one was read back.

    Raises:
        CheckpointError: The path cannot be a checkpoint, or exists already; or the state
            could not be written or read back, and the path is left as it was. Or processes
            give different paths, different `about`, or different numbers of a leaf that is
            no array over devices of all of them.
        ArgumentError: The path is no path, or the state has a leaf that no checkpoint can
            hold. Nothing was written.
        StateError: An array of the state was donated, or cut. Nothing was written.
        JobError: Another process does not call `save`, or does not say whether it could
            write its part, within an hour. What is waited for is printed after a minute.

    Example:
        >>> opt_state = sparsejax.init(tx, params, mesh)
        >>> sparsejax.save("run/1000", {"params": params, "opt_state": opt_state})

    See Also:
        `sparsejax.restore`: reads it, on any number of ranks.
        `sparsejax.resized`: changes the number of ranks of a state in memory.
        `sparsejax.abstract_state`: a target for checkpoints of orbax's own.
    """
    together.all_call("sparsejax.save")
    own = together.on_all("whether it can save", lambda: _Own.of(path, state, about))
    together.check_equal(
        together.Same(
            "the path",
            str(own.folder),
            str(own.folder),
            "All processes write their parts into one folder: give all the same path, "
            "without a number of the process in it.",
        ),
        together.Same(
            "about=",
            json.dumps(own.record.about, sort_keys=True),
            str(own.record.about),
            "What a checkpoint belongs to is the same on all processes: give all the same.",
        ),
        together.Same(
            "the leaf",
            _texts(own.record.tree, own.stored) if store.place().processes > 1 else {},
            "",
            "Give all processes the same tree. Process 0 alone writes what is no array "
            "over devices of all processes: make it one, or keep it in a file of each "
            "process.",
        ),
    )
    part = own.record.tree
    reading.check_dtypes(arrays_of(part), own.stored)
    storage.write(own.folder, own.written, part, own.stored, replace)


class _Own(NamedTuple):
    """What this process saves.

    Attributes:
        folder: The folder.
        record: The description of the state.
        written: The record as it is written.
        stored: The arrays, in the order of the tree.
    """

    folder: Any
    record: records.Record
    written: Any
    stored: list[Any]

    @classmethod
    def of(cls, path, state, about) -> "_Own":
        """Describes the state; raises if it cannot be saved."""
        folder = folders.folder_of(path)
        part, arrays = described(state)
        for x in arrays:
            if isinstance(x, jax.ShapeDtypeStruct):
                raise ArgumentError(
                    f"sparsejax.save was given a state without numbers, with a {x}, as "
                    "jax.eval_shape and sparsejax.abstract_state make them."
                )
        tree.check_not_donated(state, "sparsejax.save")
        check_whole(state)
        about = records.check_about(about)
        record = records.Record(records.versions(), ranks_of(state), about, part)
        written = records.written(record)
        size = len(json.dumps(written))
        if size > records.LARGEST:
            raise ArgumentError(
                f"the description of the state would have {size:,} bytes, and restore "
                f"reads {records.LARGEST:,}: keep long texts, and lists of numbers, as "
                "arrays."
            )
        return cls(folder, record, written, list(map(_stored, arrays)))


def _stored(x):
    """Returns an array in the form in which it is given to orbax."""
    if not isinstance(x, jax.Array):
        x = np.asarray(x)
        return x.astype(x.dtype.newbyteorder("="), copy=False)
    if is_key(x):
        x = jax.random.key_data(x)
    # In a job of several processes orbax refuses arrays that are local to one of them.
    return jax.device_get(x) if jax.process_count() > 1 and x.is_fully_addressable else x


def _texts(part, stored):
    """Returns all leaves as texts by path, with the numbers that process 0 writes alone."""
    texts, of_part = {}, list(leaves(part))
    names = tree.distinct([path for path, _ in of_part])
    for path, (_, leaf) in zip(names, of_part, strict=True):
        if isinstance(leaf, Value):
            text = repr(leaf.value)
            cut = f"{text[:_LONG]}... of hash {agreement.hashed(text)}"
            texts[path] = text if len(text) <= _LONG else cut
            continue
        x = None if leaf.number is None else stored[leaf.number]
        texts[path] = str(leaf)
        if isinstance(x, np.ndarray):
            of = f"of hash {agreement.hashed(x)}"
            texts[path] = str(x.item()) if x.size == 1 else f"{leaf} {of}"
    return texts
