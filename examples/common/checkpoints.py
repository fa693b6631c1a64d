"""The state of a run on disk, by orbax: what it is of is kept beside it, and compared."""

import pathlib
from collections.abc import Mapping
from typing import Any

import jax


# A full disk is one of these, by whichever library meets it first.
_FAILURES = (OSError, ValueError, RuntimeError)


class Checkpoints:
    """The checkpoints of one run, the last two of them.

    Args:
        folder: Where they are.
        about: What the state is of: the model, the data, the devices. A state of anything
            else is refused.
    """

    def __init__(self, folder: str | pathlib.Path, about: Mapping[str, Any]):
        import orbax.checkpoint as ocp  # Takes a second, for those who want it.

        self._args = ocp.args
        self._folder = pathlib.Path(folder).absolute()
        self._about = dict(about)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=2, enable_async_checkpointing=False
        )
        try:
            self._manager = ocp.CheckpointManager(self._folder, options=options)
        except _FAILURES as error:
            raise SystemExit(
                f"There can be no checkpoints in {folder}: {_line(error)}"
            ) from None

    def last(self) -> int | None:
        """The step of the last good one."""
        return self._manager.latest_step()

    def require_none(self) -> None:
        """Ends the script where there is one, which a new run would overwrite."""
        if self.last() is not None:
            raise SystemExit(
                f"{self._folder} has a checkpoint of step {self.last()}: go on from it "
                "with --resume, or name another folder with --checkpoint."
            )

    def restore(self, state: Any, steps: int) -> Any:
        """The last state, placed as the given one is; ends the script where it is another.

        Args:
            state: A fresh one.
            steps: How many steps the run is to have.
        """
        step = self.last()
        if step is None:
            raise SystemExit(
                f"{self._folder} has no checkpoint to go on from: name with --sync those "
                "runs that have one, or leave out --resume."
            )
        about = self._manager.restore(
            step, args=self._args.Composite(about=self._args.JsonRestore())
        )["about"]
        self._compare(about, step)
        if step >= steps:
            raise SystemExit(
                f"The checkpoint in {self._folder} is of step {step} already, and --steps "
                f"is {steps}: ask for more, or name with --sync the runs that are not done."
            )
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
        )
        restored = self._manager.restore(
            step, args=self._args.Composite(state=self._args.StandardRestore(target))
        )
        return restored["state"]

    def _compare(self, about, step):
        for key in [*self._about, *about]:
            there, here = about.get(key, "nothing"), self._about.get(key, "nothing")
            if there != here:
                raise SystemExit(
                    f"The checkpoint of step {step} in {self._folder} is of another run: "
                    f"of {key} it has {there}, and this run has {here}."
                )

    def save(self, step: int, state: Any) -> None:
        """Writes a state whole, or ends the script and leaves what was there.

        Args:
            step: How many steps were taken.
            state: After them.
        """
        before = self.last()
        try:
            self._manager.save(
                step,
                args=self._args.Composite(
                    state=self._args.StandardSave(state),
                    about=self._args.JsonSave(self._about),
                ),
            )
            self._manager.wait_until_finished()
        except _FAILURES as error:
            kept = (
                "there was none before" if before is None else f"that of {before} is kept"
            )
            raise SystemExit(
                f"The checkpoint of step {step} could not be written to {self._folder}, "
                f"and {kept}: {_line(error)}"
            ) from None

    def close(self) -> None:
        self._manager.close()


def described(params: Any) -> dict[str, str]:
    """What can be told of parameters without their numbers: {parameter path: its type}."""
    paths = jax.tree_util.tree_leaves_with_path(params)
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    shape = lambda x: "x".join(map(str, x.shape))
    return {f"parameter {name(path)}": f"{x.dtype} {shape(x)}" for path, x in paths}


def _line(error):
    text = (getattr(error, "strerror", None) or str(error)).strip() or type(error).__name__
    return text.splitlines()[0][:200]
