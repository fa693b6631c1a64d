"""A cache of data that is slow to read, in ~/.cache/sparsejax or in $XDG_CACHE_HOME."""

import hashlib
import os
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np


Arrays = dict[str, np.ndarray]


def cached(name: str, key: object, make: Callable[[], Arrays]) -> Arrays:
    """Arrays, made the first time and read later.

    Args:
        name: The name of the file.
        key: What the arrays depend on: a change makes them anew.
        make: Makes them.
    """
    digest = hashlib.sha256(repr(key).encode()).hexdigest()
    path = _folder() / f"{name}-{digest[:16]}.npz"
    try:
        with np.load(path) as stored:
            return dict(stored)
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
        arrays = make()
        _store(path, arrays)
        return arrays


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sparsejax"


def _store(path, arrays):
    """Writes the cache, whole or not at all; without a place to write, not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            np.savez(file, **arrays)
        os.replace(file.name, path)
    except OSError:
        pass
