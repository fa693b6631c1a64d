"""The state of a run on disk: a folder for each step, the last two of them."""

import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import jax

import sparsejax
from sparsejax.errors import CheckpointError


class Checkpoints:
    """The checkpoints of one run, the last two of them.

    Args:
        folder: The folder of the checkpoints.
        about: What the run is: the example, its options, the data. A state of anything else
            is refused.
    """

    def __init__(self, folder: str | pathlib.Path, about: Mapping[str, Any]):
        self._folder = pathlib.Path(folder).absolute()
        self._about = dict(about)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SystemExit(
                f"There can be no checkpoints in {folder}: {error.strerror}"
            ) from None

    def _steps(self):
        return sorted(int(x.name) for x in self._folder.iterdir() if x.name.isdecimal())

    def last(self) -> int | None:
        """The step of the last one; one that was not finished has no such name."""
        return max(self._steps(), default=None)

    def require_none(self) -> None:
        """Ends the script where a checkpoint exists, which a new run would overwrite."""
        if self.last() is not None:
            raise SystemExit(
                f"{self._folder} has a checkpoint of step {self.last()}: go on from it "
                "with --resume, or name another folder with --checkpoint."
            )

    def restore(self, state: Any, steps: int) -> Any:
        """The last state, placed as the given one is; ends the script where it is another.

        Args:
            state: A new one, for the present devices.
            steps: The number of steps of the run.
        """
        step = self.last()
        if step is None:
            raise SystemExit(
                f"{self._folder} has no checkpoint to go on from: name with --sync those "
                "runs that have one, or leave out --resume."
            )
        if step >= steps:
            raise SystemExit(
                f"The checkpoint in {self._folder} is of step {step} already, and --steps "
                f"is {steps}: ask for more, or name with --sync the runs that are not done."
            )
        try:
            return sparsejax.restore(self._folder / str(step), state, about=self._about)
        except CheckpointError as error:
            raise SystemExit(str(error)) from None

    def save(self, step: int, state: Any) -> None:
        """Writes a whole state, or ends the script and keeps the earlier one.

        Args:
            step: How many steps were taken.
            state: After them.
        """
        before = self.last()
        try:
            sparsejax.save(self._folder / str(step), state, about=self._about)
        except CheckpointError as error:
            kept = "" if before is None else f" The checkpoint of step {before} is kept."
            raise SystemExit(f"{error}{kept}") from None
        if jax.process_index() == 0:
            for old in self._steps()[:-2]:
                shutil.rmtree(self._folder / str(old))
