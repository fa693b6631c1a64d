"""Which launches of a compiled program XLA captures in CUDA graphs, and which are left.

XLA calls a graph a command buffer. It captures thunks (a kernel, a copy, a collective; a
conditional or a loop with all that is in it) whose types `xla_gpu_enable_command_buffer`
lists, as far as they follow one another: what cannot be captured ends a graph, and whoever
holds it, a conditional or a loop, stays outside too. Launched outside, a conditional asks
the host once and a loop once a turn; captured, the device answers itself.

XLA prints the thunks after its passes. Whether the driver takes a graph is not seen here.
"""

import collections
import contextlib
import dataclasses
import pathlib
import re
import tempfile
from collections.abc import Iterator
from typing import Self

from benchmarks.device.hlo import ProgramError


# What is captured unless something else is asked for, as of JAX 0.11.
USUAL = ("FUSION", "CUBLAS", "CUBLASLT", "CUDNN", "CUSTOM_CALL", "DYNAMIC_SLICE_FUSION")
# By name, the types of thunks that are captured.
COMMANDS = {
    "usual": USUAL,
    "and COLLECTIVES": (*USUAL, "COLLECTIVES"),
    "and CONDITIONAL, WHILE": (*USUAL, "CONDITIONAL", "WHILE"),
    "and all three": (*USUAL, "COLLECTIVES", "CONDITIONAL", "WHILE"),
}
ALL = COMMANDS["and all three"]
_THUNK = re.compile(r"( *)\d+: (k\w+)")
_GRAPH = "kCommandBuffer"
_ASKS = {"kConditional", "kWhile"}
# What holds others, and what only waits on the device.
_NO_LAUNCH = {"kAsyncStart", "kAsyncDone", "kDynamicSliceFusion", "kSequential"}


@dataclasses.dataclass(frozen=True)
class Graphs:
    """The launches of a program: all that it has, whichever branches are taken.

    Attributes:
        captured: How many are in graphs.
        outside: How many of each kind are not.
        asks: How many conditionals and loops ask the host.
        graphs: How many graphs there are.
    """

    captured: int
    outside: dict[str, int]
    asks: int
    graphs: int

    @property
    def whole(self) -> bool:
        """Whether all is one graph."""
        return self.graphs == 1 and not self.outside and not self.asks

    @classmethod
    def of(cls, text: str) -> Self:
        """Reads the thunks that XLA has printed, one a line; what one holds is indented."""
        captured = asks = graphs = 0
        outside: collections.Counter[str] = collections.Counter()
        graph = None  # how far the graph is indented that a line is in
        for line in text.splitlines():
            found = _THUNK.match(line)
            if found is None:
                continue  # a name of a branch
            indent, kind = len(found[1]), found[2]
            graph = None if graph is not None and indent <= graph else graph
            if graph is not None:
                captured += kind not in _NO_LAUNCH | _ASKS
            elif kind == _GRAPH:
                graph, graphs = indent, graphs + 1
            elif kind in _ASKS:
                asks += 1
            elif kind not in _NO_LAUNCH:
                outside[kind] += 1
        if not captured and not outside:
            raise ProgramError("XLA printed no thunks that launch anything.")
        return cls(captured, dict(outside), asks, graphs)


def options(commands: tuple[str, ...]) -> dict[str, str]:
    """For `compiler_options`: captures thunks of these types, and no others."""
    return {"xla_gpu_enable_command_buffer": ",".join(commands)}


@contextlib.contextmanager
def printed(commands: tuple[str, ...]) -> Iterator[tuple[dict[str, str], list[Graphs]]]:
    """The options to compile one program with; behind them its graphs, once it is."""
    found: list[Graphs] = []
    with tempfile.TemporaryDirectory() as folder:
        yield options(commands) | {"xla_dump_to": folder}, found
        for name in ("thunk_sequence_after_thunk_passes", "thunk_sequence"):
            files = sorted(pathlib.Path(folder).glob(f"*.{name}.txt"))
            if files:  # the first is there if the passes have changed anything
                break
        if len(files) != 1:
            raise ProgramError(f"XLA printed {len(files)} sequences of thunks, not one.")
        found.append(Graphs.of(files[0].read_text()))
