"""The folder of a checkpoint, and its contents.

While a checkpoint is written the name of its folder ends in `NEXT`, and an old checkpoint
that it replaces is renamed so that it ends in `LAST`. Between the two renames no folder has
the requested name, and both checkpoints are complete.
"""

import contextlib
import hashlib
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

from sparsejax import arguments
from sparsejax.arguments import cut
from sparsejax.checkpoints import reading, records, writing
from sparsejax.errors import CheckpointError


NEXT, LAST = ".sparsejax-next", ".sparsejax-last"
_RESERVED = (NEXT, LAST, writing.UNFINISHED)
_LONGEST = 255 - len(NEXT + writing.UNFINISHED)  # bytes of a name
_LONGEST_PATH = 3900  # bytes; Linux takes 4095, and paths of files in it are longer

# Top folders of paths that orbax takes for buckets: /gs/a for gs://a.
_BUCKETS = ("gs", "s3", "az", "hf")


def folder_of(path: str | os.PathLike[str]) -> Any:
    """Returns the folder at a path, which may be in a bucket, as gs://bucket/run/12.

    Raises if no checkpoint can be written there.
    """
    text = arguments.check_path("path", path)
    if "://" in text:
        return _in_bucket(text)
    with in_words(text):
        folder = pathlib.Path(text).absolute()
        if ".." in folder.parts:  # after a link it is the parent of the link's target
            folder = folder.resolve()
    why = _unusable(folder)
    if why is not None:
        raise CheckpointError(f"no checkpoint can be in {cut(repr(text))}: {why}.")
    return folder


def _in_bucket(text):
    if not text.startswith("gs://") or any(x in text for x in "[]*?\\"):
        raise CheckpointError(
            f"no checkpoint can be in {cut(repr(text))}: of buckets those of gs:// "
            "can have one, at a path without [, ], *, ? and backslashes. Name another."
        )
    writing.orbax()
    from etils import epath  # a dependency of orbax

    return epath.Path(text)


def _unusable(folder):
    """Returns why a local folder cannot be a checkpoint, and the fix; None if it can."""
    name, link = folder.name, "Name it by a link that has another name"
    size = len(name.encode())
    if not name:
        return "it is the root. Name a folder in it"
    if size > _LONGEST:
        return (
            f"its name has {size} bytes, and gets a longer one while it is written. Give "
            f"it a name of at most {_LONGEST}"
        )
    size = len(str(folder).encode())
    if size > _LONGEST_PATH:
        return f"its path has {size} bytes. Give it one of at most {_LONGEST_PATH}"
    for reserved in _RESERVED:
        if reserved in name:
            return f"{reserved!r} marks what is not finished. Give it another name"
    if "\\" in str(folder):
        return f"TensorStore takes a backslash for a slash. {link}"
    if "gs:/" in str(folder) or folder.parts[1] in _BUCKETS:
        return f"orbax takes it for a bucket. {link}"
    return None


@contextlib.contextmanager
def in_words(folder: Any) -> Iterator[None]:
    """Turns errors of the file system into a `CheckpointError` that names the folder."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # a loop of links raises RuntimeError
        raise CheckpointError(
            f"what is in {folder} cannot be read: {reading.line(error)}."
        ) from error


def description(folder: Any) -> tuple[Any, records.Record]:
    """Returns the folder that contains a checkpoint, and the record of its JSON file."""
    with in_words(folder):
        there = whole(folder)
        if not is_checkpoint(there):
            raise CheckpointError(missing(folder))
        return there, record(there)[0]


def record(folder: Any) -> tuple[records.Record, bytes]:
    """Reads the JSON file of a checkpoint: returns the record, and the file's bytes."""
    file = folder / writing.ABOUT / "metadata"
    with file.open("rb") as opened:
        text = opened.read(records.LARGEST + 1)
    return records.read(text, str(file)), text


def identity(folder: Any) -> str:
    """Returns a hash that differs between checkpoints, but not between copies of one."""
    digest = hashlib.blake2b(
        (folder / writing.ABOUT / "metadata").read_bytes(), digest_size=8
    )
    # It lists the files with the arrays, which have names drawn at random.
    listing = folder / reading.ARRAYS / "manifest.ocdbt"
    if listing.is_file():
        digest.update(listing.read_bytes())
    return digest.hexdigest()


def is_checkpoint(folder: Any) -> bool:
    """Whether a folder has a JSON file that describes a state."""
    return (folder / writing.ABOUT / "metadata").is_file()


def whole(folder: Any) -> Any:
    """Returns the folder of the checkpoint: after a crash between renames another one."""
    new, old = beside(folder, NEXT), beside(folder, LAST)
    if folder.exists() or not old.exists():
        return folder
    return new if new.exists() else old


def beside(folder: Any, suffix: str) -> Any:
    """Returns the folder beside this one whose name is longer by a suffix."""
    return folder.parent / f"{folder.name}{suffix}"


def unfinished(folder: Any) -> list[Any]:
    """Returns the folders of a checkpoint that was written and not renamed."""
    with contextlib.suppress(OSError):
        prefix = f"{folder.name}{NEXT}"
        return [x for x in folder.parent.iterdir() if x.name.startswith(prefix)]
    return []


def is_link(folder: Any) -> bool:
    """Whether it is a link, broken or not."""
    return isinstance(folder, pathlib.Path) and folder.is_symlink()


def removed(folder: Any) -> None:
    """Removes a folder, if it exists; if it is a link, only the link."""
    if is_link(folder):
        folder.unlink()
    elif isinstance(folder, pathlib.Path):
        shutil.rmtree(folder, ignore_errors=True)
    elif folder.exists():
        folder.rmtree()


def missing(folder: Any) -> str:
    """Returns a message that says why a folder is no checkpoint."""
    if not folder.exists():
        found = unfinished(folder)
        if found:
            return (
                f"the checkpoint in {folder} was not finished, {found[0].name} is what was "
                "written before a crash or a full disk ended it. Take the one before, and "
                "remove that folder."
            )
        if is_link(folder):
            return f"{folder} is a link to nothing, and a checkpoint is a folder."
        return f"there is no checkpoint in {folder}: there is no such folder."
    if not folder.is_dir():
        return f"{folder} is a file, and a checkpoint is a folder, as sparsejax.save makes."
    names = sorted(entry.name for entry in folder.iterdir())
    if {"_METADATA", "_CHECKPOINT_METADATA", "default"} & set(names):
        what = "part of it is missing, or orbax wrote it without sparsejax.save"
        if (folder / writing.ABOUT).exists():
            what = f"{writing.ABOUT}/metadata is missing, so it was not copied whole"
        return (
            f"{folder} is no checkpoint of sparsejax.save: {what}. Restore one of orbax "
            "alone with orbax, into sparsejax.abstract_state(tx, params, mesh, ranks=...)."
        )
    inside = [name for name in names if (folder / name / writing.ABOUT).exists()]
    if inside:
        return (
            f"{folder} holds checkpoints, and is none: name one, such as "
            f"{folder / inside[-1]}."
        )
    has = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "") or "nothing"
    return f"{folder} is no checkpoint of sparsejax.save: it has {has}."
