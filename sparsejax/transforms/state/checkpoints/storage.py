"""The folder of a checkpoint: written whole or not at all, by orbax.

A folder has what orbax writes: `state` with the arrays, `about/metadata` with the JSON, and
orbax's own `_CHECKPOINT_METADATA`. orbax writes into a folder of another name beside it,
and renames that once all processes have written, so a crash or a full disk leaves nothing
under the name that was asked for. A checkpoint that takes the place of another is written
under a name of its own first: in between one of the two is whole at any time.
"""

import contextlib
import os
import pathlib
import re
import shutil
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from sparsejax.errors import CheckpointError
from sparsejax.transforms.state.checkpoints import checksums, records, together


_ARRAYS, _ABOUT = "state", "about"
_NEXT, _LAST = ".sparsejax-next", ".sparsejax-last"
_UNFINISHED = ".orbax-checkpoint-tmp"

# A full disk is one of these, by whichever library meets it.
_FAILURES = (OSError, ValueError, RuntimeError)


def folder_of(path: str | os.PathLike[str]) -> Any:
    """A folder by its path, which may be one of a bucket, as gs://bucket/run/12."""
    if "://" in str(path):
        _orbax()
        from etils import epath  # orbax's own

        return epath.Path(path)
    return pathlib.Path(path).absolute()


def _orbax() -> Any:
    try:
        import orbax.checkpoint as ocp  # takes a second, for those who want it
    except ImportError as error:
        raise CheckpointError(
            f"checkpoints are written and read by orbax, and it cannot be imported: {error}"
            ". Install it: pip install 'sparsejax[checkpoint]', or pip install "
            "orbax-checkpoint."
        ) from None
    return ocp


def description(folder: Any) -> tuple[Any, records.Record]:
    """The folder in which a checkpoint is, and what stands beside its arrays."""
    there = folder
    if not folder.exists() and _beside(folder, _NEXT).exists():
        # A crash between two renames: the new one is whole, the one before it too.
        there = _beside(folder, _NEXT)
    file = there / _ABOUT / "metadata"
    if not file.is_file():
        raise CheckpointError(_missing(folder))
    with file.open("rb") as opened:
        text = opened.read(records.LARGEST + 1)
    return there, records.read(text, str(file))


def _beside(folder, suffix):
    return folder.parent / f"{folder.name}{suffix}"


def _missing(folder):
    """Why a folder is no checkpoint."""
    if not folder.exists():
        found = _unfinished(folder)
        if found:
            return (
                f"the checkpoint in {folder} was not finished, {found[0].name} is what was "
                "written before a crash or a full disk ended it. Take the one before, and "
                "remove that folder."
            )
        return f"there is no checkpoint in {folder}: there is no such folder."
    if not folder.is_dir():
        return f"{folder} is a file, and a checkpoint is a folder, as sparsejax.save makes."
    names = sorted(entry.name for entry in folder.iterdir())
    if {"_METADATA", "_CHECKPOINT_METADATA", "default"} & set(names):
        what = "part of it is missing, or orbax wrote it without sparsejax.save"
        if (folder / _ABOUT).exists():
            what = f"{_ABOUT}/metadata is missing, so it was not copied whole"
        return (
            f"{folder} is no checkpoint of sparsejax.save: {what}. Restore one of orbax "
            "alone with orbax, into sparsejax.abstract_state(tx, params, mesh, ranks=...)."
        )
    inside = [name for name in names if (folder / name / _ABOUT).exists()]
    if inside:
        return (
            f"{folder} holds checkpoints, and is none: name one, such as "
            f"{folder / inside[-1]}."
        )
    has = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "") or "nothing"
    return f"{folder} is no checkpoint of sparsejax.save: it has {has}."


def _unfinished(folder):
    """Folders that orbax has not finished, of this name."""
    with contextlib.suppress(OSError):
        names = tuple(f"{folder.name}{end}{_UNFINISHED}" for end in ("", _NEXT))
        return [x for x in folder.parent.iterdir() if x.name.startswith(names)]
    return []


def write(folder: Any, about: dict[str, Any], arrays: list[Any], replace: bool) -> None:
    """Writes a checkpoint; all processes call it, and where one fails, all raise.

    Args:
        folder: Where.
        about: The JSON.
        arrays: The arrays, by their numbers.
        replace: Whether it may take the place of one that is there.
    """
    ocp = _orbax()
    is_there = together.on_all(
        "whether it can save there", lambda: _is_there(folder, replace)
    )
    to = _beside(folder, _NEXT) if is_there else folder
    items = {_ABOUT: ocp.args.JsonSave(about)}
    if arrays:
        tree = {str(number): x for number, x in enumerate(arrays)}
        items[_ARRAYS] = ocp.args.PyTreeSave(tree)

    def save():
        with checksums.of_chunks(), _checkpointer(ocp, range(jax.process_count())) as all:
            all.save(to, args=ocp.args.Composite(**items))

    try:
        _by_first("whether it has made room", lambda: _cleaned(folder, is_there))
        together.on_all("whether it has written its part", save)
        _by_first(
            "whether it has named what is written", lambda: _finished(folder, is_there)
        )
    except _FAILURES as error:
        with contextlib.suppress(OSError):
            if jax.process_index() == 0:
                _cleaned(folder, is_there)
        kept = "the one before is kept" if is_there else "nothing of it is kept"
        raise CheckpointError(
            f"the checkpoint could not be written to {folder}, and {kept}: {_line(error)}."
        ) from error


def _is_there(folder, replace):
    """Whether a checkpoint is there, whose place another may take."""
    is_there = folder.exists()
    if is_there and not replace:
        raise CheckpointError(
            f"{folder} is there already: give each checkpoint a folder of its own, such as "
            f"{folder}/{{step}}, or let it take the place of that one, "
            "sparsejax.save(path, state, replace=True)."
        )
    if is_there and not isinstance(folder, pathlib.Path):
        raise CheckpointError(
            f"{folder} is there already, and in a bucket no folder takes the place of "
            "another at once: give each checkpoint a folder of its own."
        )
    if is_there and not (folder / _ABOUT / "metadata").is_file():
        raise CheckpointError(f"{_missing(folder)} It is left as it is: name another.")
    return is_there


def _checkpointer(ocp, processes):
    """What writes and reads, and waits for no other than these processes.

    Of several it is told which they are, though they are all: orbax then waits for them at
    barriers, for five minutes at most, and else in collectives, for ever.
    """
    arrays = ocp.PyTreeCheckpointHandler(use_zarr3=True)  # which has checksums
    handlers = {_ABOUT: ocp.JsonCheckpointHandler(), _ARRAYS: arrays}
    options = ocp.options.MultiprocessingOptions()
    if jax.process_count() > 1:
        options = ocp.options.MultiprocessingOptions(min(processes), set(processes))
    handler = ocp.CompositeCheckpointHandler(**handlers)
    return ocp.Checkpointer(handler, multiprocessing_options=options)


def _by_first(what, function):
    """What process 0 does, before all go on."""
    together.on_all(what, lambda: function() if jax.process_index() == 0 else None)


def _cleaned(folder, is_there):
    """Removes what a save that was cut short has left of a checkpoint."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for old in _unfinished(folder):
        _removed(old)
    if is_there and folder.exists():  # one of the other two is the only whole one else
        _removed(_beside(folder, _NEXT))
        _removed(_beside(folder, _LAST))


def _finished(folder, is_there):
    """The new one takes the place of the old one, where there is one."""
    if is_there:
        folder.rename(_beside(folder, _LAST))
        _beside(folder, _NEXT).rename(folder)
    for suffix in (_NEXT, _LAST):
        _removed(_beside(folder, suffix))


def _removed(folder):
    if isinstance(folder, pathlib.Path):
        shutil.rmtree(folder, ignore_errors=True)
    elif folder.exists():
        folder.rmtree()


def read(
    folder: Any,
    shapes: Mapping[int, tuple[int, ...] | None],
    places: Mapping[int, Any],
    paths: Mapping[int, str],
) -> dict[int, Any]:
    """Arrays of a checkpoint, by their numbers.

    Args:
        folder: Where it is.
        shapes: The shapes of all of its arrays; None where that is not known.
        places: The shardings of those that are to be read; None for one that every process
            has whole in its own memory, as NumPy's.
        paths: Where in the state these are, for messages.
    """
    if not places:
        return {}
    ocp = _orbax()
    if not (folder / _ARRAYS).is_dir():
        raise CheckpointError(
            f"the checkpoint in {folder} is incomplete: it has no folder {_ARRAYS!r} with "
            "its arrays. Take the one before."
        )

    def how(number, place):
        if place is None:
            return ocp.RestoreArgs(restore_type=np.ndarray)
        return ocp.ArrayRestoreArgs(sharding=place, global_shape=shapes[number])

    hows = {str(number): how(number, place) for number, place in places.items()}
    # An older format may have arrays that are no part of a state any more.
    args = ocp.args.PyTreeRestore(
        dict.fromkeys(hows, 0), restore_args=hows, partial_restore=True
    )
    try:
        # Another would wait for ever where this one cannot read its part.
        with _checkpointer(ocp, [jax.process_index()]) as checkpointer:
            done = checkpointer.restore(folder, args=ocp.args.Composite(**{_ARRAYS: args}))
        arrays = {number: done[_ARRAYS][str(number)] for number in places}
    except Exception as error:  # whatever a library makes of files that are damaged
        raise CheckpointError(
            f"the arrays of the checkpoint in {folder} cannot be read, so it is incomplete "
            f"or damaged{_at(error, paths)}: {_line(_first(error))}. Take the one before."
        ) from error
    for number, x in arrays.items():
        shape, found = shapes[number], getattr(x, "shape", None)
        if found is None or shape not in (None, found):
            has = "no array" if found is None else f"an array {list(found)}"
            says = "is of one" if shape is None else f"says {list(shape)}"
            raise CheckpointError(
                f"the checkpoint in {folder} is damaged: at {paths[number]!r} it has "
                f"{has}, and its description {says}."
            )
    return arrays


def _first(error):
    """What an error came from, which says more than what orbax made of it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _at(error, paths):
    """Where in the state what cannot be read is, if TensorStore names it."""
    found = re.search(r'"(\d+)/', str(_first(error)))
    path = paths.get(int(found[1])) if found else None
    return "" if path is None else f" at {path!r}"


def _line(error):
    text = (getattr(error, "strerror", None) or str(error)).strip() or type(error).__name__
    return text.splitlines()[0][:300].rstrip(".")
