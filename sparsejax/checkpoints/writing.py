"""Writes a checkpoint by orbax into a folder that does not exist yet.

orbax writes into a folder of another name beside that one, and renames it when all
processes have written. Chunks of arrays are written by a custom type handler, because that
of orbax has no option for checksums.
"""

import asyncio
import glob
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from sparsejax.checkpoints import chunks, reading


ABOUT = "about"
UNFINISHED = ".orbax-checkpoint-tmp"  # part of the name of orbax's temporary folder


def orbax() -> Any:
    """Returns orbax's module of checkpoints; raises if it is not installed."""
    try:
        import orbax.checkpoint as ocp  # optional, and its import takes a second
    except ImportError as error:
        raise reading.missing(error) from None
    return ocp


def write(folder: Any, about: dict[str, Any], arrays: Sequence[Any]) -> None:
    """Writes a checkpoint. All processes call it.

    Args:
        folder: The folder, which does not exist.
        about: The JSON.
        arrays: The arrays, in the order of their numbers.
    """
    ocp = orbax()
    items = {ABOUT: ocp.args.JsonSave(about)}
    if arrays:
        tree = {str(number): x for number, x in enumerate(arrays)}
        items[reading.ARRAYS] = ocp.args.PyTreeSave(tree)
    with _checkpointer(ocp) as checkpointer:
        checkpointer.save(_literal(folder), args=ocp.args.Composite(**items))


def _checkpointer(ocp):
    """Makes a checkpointer that waits for other processes for a limited time.

    It is given the list of active processes, although all are: orbax then waits for them at
    barriers, at most five minutes, and otherwise in collectives, without a timeout.
    """
    ours = _handler(ocp)
    registry = ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, ours), (jax.Array, ours)
    )
    arrays = ocp.PyTreeCheckpointHandler(use_zarr3=True, type_handler_registry=registry)
    handlers = {ABOUT: ocp.JsonCheckpointHandler(), reading.ARRAYS: arrays}
    options = ocp.options.MultiprocessingOptions()
    if jax.process_count() > 1:
        processes = set(range(jax.process_count()))
        options = ocp.options.MultiprocessingOptions(0, processes)
    handler = ocp.CompositeCheckpointHandler(**handlers)
    return ocp.Checkpointer(handler, multiprocessing_options=options)


def _handler(ocp):
    """Makes a type handler by which each process writes the chunks of its shards."""

    class Handler(ocp.type_handlers.NumpyHandler):  # so that orbax alone restores arrays
        _array_metadata_store = None  # without it orbax warns at each save

        async def serialize(self, values, infos, args=None):
            written = _written(ocp, values, infos)
            return [ocp.future.CommitFutureAwaitingContractedSignals(written)]

    return Handler()


async def _written(ocp, values, infos):
    await asyncio.gather(*(info.await_path_creation() for info in infos))
    pairs = zip(values, infos, strict=True)
    await asyncio.gather(*(_write_array(ocp, x, info) for x, info in pairs))


async def _write_array(ocp, x, info):
    is_first, own = jax.process_index() == 0, chunks.own(x)
    if not (is_first or own):
        return
    spec = ocp.type_handlers.get_json_tspec_write(
        info,
        use_ocdbt=True,
        global_shape=x.shape,
        local_shape=chunks.shape_of(x),
        dtype=x.dtype,
        process_index=jax.process_index(),
    )
    spec["metadata"]["codecs"] = list(chunks.CODECS)
    # Process 0 alone writes the metadata of an array.
    how = {"create": True} if is_first else {"assume_metadata": True}
    ts = reading.tensorstore()
    store = await ts.open(spec, open=True, dtype=x.dtype, context=info.ts_context, **how)
    writing = (
        store[chunk.where].write(
            chunk.numbers(), can_reference_source_data_indefinitely=True
        )
        for chunk in own
    )
    await asyncio.gather(*writing)


def _literal(folder):
    """Returns the folder as a path of orbax whose `glob` takes its own path literally.

    orbax finds the files of each process by `folder.glob("ocdbt.process_*")`, and would
    find none if it took brackets in the path of the folder for a pattern.
    """
    if not isinstance(folder, pathlib.Path):
        return folder
    from etils import epath  # the library of orbax's paths

    path: Any = type(epath.Path("/"))

    class Literal(path):
        def glob(self, pattern: str) -> Iterator[Any]:
            here = glob.escape(os.fspath(self))
            yield from map(type(self), glob.iglob(os.path.join(here, pattern)))

    return Literal(folder)
