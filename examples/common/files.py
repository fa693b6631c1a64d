"""The user's own file, line by line; errors in it are reported in one sentence."""

import pathlib
from collections.abc import Iterator
from typing import NoReturn

import numpy as np


def lines(path: str | pathlib.Path, blank: bool = False) -> Iterator[tuple[int, str]]:
    """The number and the text of each line that has any.

    Ends the script where the file does not exist, is empty, or is not UTF-8.

    Args:
        path: The file.
        blank: Whether lines without text are wanted, too.
    """
    number, found = 0, False
    with _opened(path) as file:
        for number, raw in enumerate(file, start=1):
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                refuse(
                    path,
                    number,
                    f"it is not UTF-8 text (byte {error.object[error.start]:#04x}); "
                    "convert it first, as with iconv -f LATIN1 -t UTF-8",
                )
            if "\0" in text:
                refuse(path, number, "there is a zero byte: this is not UTF-8 text")
            found = found or bool(text.strip())
            if blank or text.strip():
                yield number, text.rstrip("\r\n")
    if not found:
        raise SystemExit(f"{path} has nothing in it.")


def arrays(path: str | pathlib.Path, *names: str) -> list[np.ndarray]:
    """Arrays of a file of NumPy's format .npz.

    Args:
        path: The file.
        names: Those of the arrays.
    """
    _opened(path).close()
    try:
        with np.load(path, allow_pickle=False) as stored:
            missing = [name for name in names if name not in stored]
            if missing:
                raise SystemExit(
                    f"{path} has no array {missing[0]!r}: it is to have "
                    f"{' and '.join(names)}, and has {', '.join(stored) or 'none'}."
                )
            return [stored[name] for name in names]
    except (OSError, EOFError, ValueError, AttributeError, TypeError):
        raise SystemExit(
            f"{path} is no file of NumPy's format .npz: write it with "
            f"numpy.savez({str(path)!r}, {', '.join(f'{name}=...' for name in names)})."
        ) from None


def refuse(path: str | pathlib.Path, number: int, why: str) -> NoReturn:
    """Ends the script: a line is not as it should be.

    Args:
        path: The file.
        number: The line's.
        why: A clause.
    """
    raise SystemExit(f"{path}, line {number}: {why}.")


def _opened(path):
    try:
        return pathlib.Path(path).open("rb")
    except OSError as error:
        raise SystemExit(f"{path} cannot be read: {error.strerror}.") from None
