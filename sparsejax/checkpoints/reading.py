"""Reads the arrays of a checkpoint from disk, by TensorStore.

Each is a zarr 3 array whose name is its number, and all are in one OCDBT store. Both
formats are documented. `restore` and `save` share this code: `save` reads back a checkpoint
before the folder gets its name, so what it has accepted can be restored.

If there are several processes, each compares the chunks that it has written, so that every
element is compared once.
"""

import contextlib
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from sparsejax.arguments import cut
from sparsejax.checkpoints import chunks
from sparsejax.checkpoints.description import Array
from sparsejax.errors import ArgumentError, CheckpointError, message


ARRAYS = "state"  # the folder of the arrays

# Bytes of arrays that a process reads at once, and of OCDBT's cache of its tables.
_AT_ONCE, _CACHE = 2**30, 10**8


# The path in the state, for messages, and the description of each array, by its number.
Arrays = Mapping[int, tuple[str, Array]]


class _Wrong(Exception):
    """An array on disk is wrong; the arguments are its number, and why."""

    def told(self, arrays: Arrays) -> str:
        number, why = self.args
        return f"at {arrays[number][0]!r}: {why}"


def read(folder: Any, arrays: Arrays, places: Mapping[int, Any]) -> dict[int, Any]:
    """Reads arrays of a checkpoint.

    Args:
        folder: The folder of the checkpoint.
        arrays: All arrays of the checkpoint.
        places: The shardings of the arrays to read, by number; None for an array that each
            process reads whole, as a NumPy array.

    Returns:
        The arrays, by their numbers.
    """
    if not places:
        return {}
    if not (folder / ARRAYS).is_dir():
        raise CheckpointError(
            f"the checkpoint in {folder} is incomplete: it has no folder {ARRAYS!r} with "
            "its arrays. Take the one before."
        )
    try:
        stores = _opened(folder, {number: arrays[number] for number in places})
        wanted = {}
        for number, store in stores.items():
            with _at(number):
                wanted[number] = _indices(store.shape, places[number])
        found = _parts(stores, wanted)
        return {
            number: _placed(stores[number], places[number], wanted[number], parts)
            for number, parts in found
        }
    except _Wrong as error:
        raise CheckpointError(
            f"the arrays of the checkpoint in {folder} cannot be read, so it is incomplete "
            f"or damaged {error.told(arrays)}. Take the one before."
        ) from error


def check(folder: Any, arrays: Arrays, values: Sequence[Any]) -> None:
    """Raises unless the chunks that this process wrote are equal to those in memory.

    Args:
        folder: The folder that was written.
        arrays: All arrays of the checkpoint.
        values: The arrays in memory, in the order of their numbers.
    """
    own = {number: chunks.own(values[number]) for number in arrays}
    wanted = {number: [chunk.where for chunk in each] for number, each in own.items()}
    try:
        for number, parts in _parts(_opened(folder, arrays), wanted):
            here = (chunk.numbers() for chunk in own[number])
            if not all(map(_is_same, here, parts)):
                raise _Wrong(number, "it has other numbers")
    except _Wrong as error:
        why = f"what was written cannot be read back {error.told(arrays)}"
        raise CheckpointError(why) from error


def check_dtypes(arrays: Arrays, values: Sequence[Any]) -> None:
    """Raises if TensorStore does not have the dtype of an array.

    Args:
        arrays: All arrays of the checkpoint, whose paths are for the message.
        values: The arrays, in the order of their numbers.
    """
    ts = tensorstore()
    for number, x in enumerate(values):
        found = None
        with contextlib.suppress(TypeError, ValueError):
            found = ts.dtype(x.dtype).numpy_dtype
        if found != x.dtype:
            raise ArgumentError(
                f"a checkpoint holds arrays of dtypes that TensorStore has, and "
                f"{arrays[number][0]!r} is {x.dtype}: convert it, as to int8 or float64."
            )


def tensorstore() -> Any:
    """Returns TensorStore, a dependency of orbax; raises if it is not installed."""
    try:
        import tensorstore  # an optional dependency, as orbax
    except ImportError as error:
        raise missing(error) from None
    return tensorstore


def missing(error: ImportError) -> CheckpointError:
    """Returns the error to raise if a library for checkpoints cannot be imported."""
    return CheckpointError(
        "checkpoints are written by orbax and read by its TensorStore, and one of them "
        f"cannot be imported: {error}. Install both: pip install 'sparsejax[checkpoint]', "
        "or pip install orbax-checkpoint."
    )


def line(error: BaseException) -> str:
    """Returns the message of an error, on one line and without a period at its end."""
    text = message(error).partition(" [tensorstore_spec=")[0].strip()
    text = text or type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return cut(text.splitlines()[0], 300).rstrip(".")


@contextlib.contextmanager
def _at(number: int) -> Iterator[None]:
    """Turns any error, which libraries raise for damaged files, into a `_Wrong`."""
    try:
        yield
    except Exception as error:
        raise _Wrong(number, line(error)) from error


def _opened(folder, arrays):
    """Opens arrays; raises unless they have the shapes and dtypes of the description."""
    ts = tensorstore()
    context = ts.Context({"cache_pool": {"total_bytes_limit": _CACHE}})
    base, opening = _base(folder), {}
    for number in arrays:
        kvstore = {"driver": "ocdbt", "base": base, "path": f"{number}/"}
        # By default missing chunks are read as zeros.
        spec = {"driver": "zarr3", "kvstore": kvstore, "fill_missing_data_reads": False}
        spec["metadata"] = {"codecs": list(chunks.CODECS)}
        opening[number] = ts.open(spec, open=True, read=True, context=context)
    stores = {}
    for number, store in opening.items():
        with _at(number):
            stores[number] = store.result()
        _check_type(number, stores[number], arrays[number][1])
    return stores


def _base(folder):
    """Returns TensorStore's specification of the place of the store of all arrays."""
    path = f"{folder / ARRAYS}/"
    if isinstance(folder, pathlib.Path):
        return {"driver": "file", "path": path}
    bucket, _, path = path.removeprefix("gs://").partition("/")
    return {"driver": "gcs", "bucket": bucket, "path": path}


def _check_type(number, store, array):
    if array.impl is not None:
        return  # key data has one more axis, and another dtype
    there = array._replace(shape=store.shape, dtype=str(store.dtype.numpy_dtype))
    if there != array:
        raise _Wrong(number, f"it is {there}, and its description says {array}")


def _indices(shape, place) -> list[chunks.Index]:
    """Returns the distinct slices of an array that devices of this process have."""
    if place is None:
        return [()]
    indices = place.addressable_devices_indices_map(tuple(shape)).values()
    return list({repr(index): index for index in indices}.values())  # slices have no hash


def _parts(stores, wanted) -> Iterator[tuple[int, list[np.ndarray]]]:
    """Yields the number and the wanted parts of each array, which are read in batches."""
    views = {number: [store[i] for i in wanted[number]] for number, store in stores.items()}
    for batch in _batches(views):
        reading = {number: list(map(_started, views[number])) for number in batch}
        for number, parts in reading.items():
            with _at(number):
                for _, is_read in parts:
                    is_read.result()
            yield number, [part for part, _ in parts]


def _started(view):
    """Starts to read into a NumPy array; returns the array, and the future of the read.

    TensorStore's `read`, which allocates the memory itself, takes a fifth longer.
    """
    part = np.empty(view.shape, view.dtype.numpy_dtype)
    return part, tensorstore().array(part).write(view)


def _batches(views) -> Iterator[list[int]]:
    """Yields the numbers of arrays to read at once: `_AT_ONCE` bytes, or one array."""
    batch, size = [], 0
    for number, each in views.items():
        more = sum(view.size * view.dtype.numpy_dtype.itemsize for view in each)
        if batch and size + more > _AT_ONCE:
            yield batch
            batch, size = [], 0
        batch.append(number)
        size += more
    if batch:
        yield batch


def _placed(store, place, indices, parts):
    """Returns an array made of its parts, with the sharding `place`."""
    if place is None:
        return parts[0]
    found = {repr(index): part for index, part in zip(indices, parts, strict=True)}
    return jax.make_array_from_callback(
        store.shape, place, lambda index: found[repr(index)], store.dtype.numpy_dtype
    )


def _is_same(here: np.ndarray, there: np.ndarray) -> bool:
    """Whether two arrays have equal bits, also for NaN and zeros of either sign."""
    bits = lambda x: np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    return here.dtype == there.dtype and np.array_equal(bits(here), bits(there))
