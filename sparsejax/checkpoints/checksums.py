"""Checksums of what a checkpoint has on disk, so that a damaged one is not taken for whole.

On disk each chunk of an array, which is compressed by zstd, ends in the checksum that zstd
has for it: 32 bits of the XXH64 of the numbers. It is computed by the process that writes a
shard, and compared by whichever process reads the chunk, on as many hosts or on others.
TensorStore's own tables of where chunks lie have checksums already. The description has the
CRC-32 of all that it says. So no bit that has turned can change what comes back, and
nothing is read twice.

orbax has no option for it, so its function that says how an array is written is replaced
while one is.
"""

import contextlib
import functools
import json
import warnings
import zlib
from collections.abc import Iterator
from typing import Any


# Of zstd's levels orbax takes the third where it writes zarr 3, in twice the time.
_ZSTD = {"level": 1, "checksum": True}
_KEY = "crc32"


@contextlib.contextmanager
def of_chunks() -> Iterator[None]:
    """While its block runs, chunks that orbax writes by zarr 3 have a checksum."""
    try:
        from orbax.checkpoint._src.serialization import tensorstore_utils as utils

        build = utils._build_zarr3_metadata
    except (ImportError, AttributeError):
        warnings.warn(
            "this version of orbax has no place for checksums that sparsejax knows: what "
            "is saved has none, and damaged numbers may be restored. Install "
            "'orbax-checkpoint>=0.12,<0.13', or a later version of sparsejax.",
            stacklevel=2,
        )
        yield
        return

    @functools.wraps(build)
    def with_checksums(*args, **options):
        metadata = build(*args, **options)
        _demand(metadata["codecs"])
        return metadata

    utils._build_zarr3_metadata = with_checksums
    try:
        yield
    finally:
        utils._build_zarr3_metadata = build


def _demand(codecs: list[dict[str, Any]]) -> None:
    """Asks zstd for its checksum, inside of shards too; without zstd, another codec."""
    for codec in codecs:
        if codec["name"] == "sharding_indexed":
            return _demand(codec["configuration"]["codecs"])
        if codec["name"] == "zstd":
            codec["configuration"] = dict(_ZSTD)
            return None
    codecs.append({"name": "crc32c"})


def sealed(given: dict[str, Any]) -> dict[str, Any]:
    """A description with the checksum of all that it says."""
    return {**given, _KEY: _checksum(given)}


def is_sealed(given: dict[str, Any]) -> bool:
    """Whether a description says what it said when it was written."""
    return given.get(_KEY) == _checksum(given)


def is_same(given: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two descriptions that are sealed say the same."""
    return given[_KEY] == other[_KEY]


def opened(given: dict[str, Any]) -> dict[str, Any]:
    """A description without its checksum."""
    return {key: value for key, value in given.items() if key != _KEY}


def _checksum(given):
    # Not of the bytes of the file: who writes JSON chooses spaces and the order of keys.
    text = json.dumps(opened(given), sort_keys=True, separators=(",", ":"))
    return zlib.crc32(text.encode())
