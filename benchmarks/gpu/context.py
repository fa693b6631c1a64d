"""The sizes of the run on a GPU, and the recorder of one of its parts."""

import pathlib

import jax

from benchmarks.harness.record import Recorder
from pallas_kernels import backends


class Context:
    """The sizes of this device, the backends that run on it, and the rows of a part."""

    def __init__(self, out: pathlib.Path, part: str):
        self.out = out
        self.gpu = jax.default_backend() == "gpu"
        self.sizes = (214_000_000, 1 << 24, 1 << 20) if self.gpu else (1 << 16, 1 << 14)
        # Those at which something is to be reached.
        self.targets = self.sizes[:2] if self.gpu else self.sizes[:1]
        self.runs = 1000 if self.gpu else 5
        # How often a side is timed, and for how many seconds at least.
        self.repeats, self.sample = (7, 0.02) if self.gpu else (1, 0.0)
        self.backends = [n for n in backends.BACKENDS if backends.why_not(n) is None]
        self.record = Kept(out / f"{part}.jsonl")


class Kept(Recorder):
    """A recorder whose rows are in a file at once."""

    def __init__(self, path: pathlib.Path):
        super().__init__(path.stem, "python -m benchmarks.gpu")
        self.path = path
        self.head["device"] = jax.devices()[0].device_kind

    def add(self, **row) -> None:
        super().add(**row)
        self.write()
