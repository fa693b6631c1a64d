"""What orbax does: it writes a checkpoint into a folder that is not there yet.

orbax writes into a folder of another name beside that one, and renames it when all
processes have written.
"""

import glob
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from sparsejax.checkpoints import checksums, reading


ABOUT = "about"
UNFINISHED = ".orbax-checkpoint-tmp"  # in the other name


def orbax() -> Any:
    """orbax, without which no checkpoint is written."""
    try:
        import orbax.checkpoint as ocp  # takes a second, for those who want it
    except ImportError as error:
        raise reading.missing(error) from None
    return ocp


def write(folder: Any, about: dict[str, Any], arrays: Sequence[Any]) -> None:
    """Writes a checkpoint; all processes call it.

    Args:
        folder: Where.
        about: The JSON.
        arrays: The arrays, by their numbers.
    """
    ocp = orbax()
    items = {ABOUT: ocp.args.JsonSave(about)}
    if arrays:
        tree = {str(number): x for number, x in enumerate(arrays)}
        items[reading.ARRAYS] = ocp.args.PyTreeSave(tree)
    with checksums.of_chunks(), _checkpointer(ocp) as checkpointer:
        checkpointer.save(_literal(folder), args=ocp.args.Composite(**items))


def _checkpointer(ocp):
    """What writes, and waits for other processes for a limited time.

    Of several it is given which they are, though they are all: orbax then waits for them at
    barriers, for five minutes at most, and else in collectives, for ever.
    """
    arrays = ocp.PyTreeCheckpointHandler(use_zarr3=True)  # which has checksums
    handlers = {ABOUT: ocp.JsonCheckpointHandler(), reading.ARRAYS: arrays}
    options = ocp.options.MultiprocessingOptions()
    if jax.process_count() > 1:
        processes = set(range(jax.process_count()))
        options = ocp.options.MultiprocessingOptions(0, processes)
    handler = ocp.CompositeCheckpointHandler(**handlers)
    return ocp.Checkpointer(handler, multiprocessing_options=options)


def _literal(folder):
    """The folder for orbax, which looks for patterns in it, with its name as it is.

    orbax globs for what each process has written, `folder.glob("ocdbt.process_*")`, and
    finds none where brackets in the folder's own path are a pattern.
    """
    if not isinstance(folder, pathlib.Path):
        return folder
    from etils import epath  # the paths of orbax

    path: Any = type(epath.Path("/"))

    class Literal(path):
        def glob(self, pattern: str) -> Iterator[Any]:
            here = glob.escape(os.fspath(self))
            yield from map(type(self), glob.iglob(os.path.join(here, pattern)))

    return Literal(folder)
