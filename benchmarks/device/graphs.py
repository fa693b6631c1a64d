"""Counts the launches of a compiled program that XLA captures in CUDA graphs.

XLA calls a graph a command buffer. It captures runs of consecutive thunks (a kernel, a
copy, a collective; a conditional or a loop with its contents) whose types are listed in
`xla_gpu_enable_command_buffer`. A thunk that cannot be captured ends a graph, and a
conditional or loop that contains it is not captured either. Outside of a graph, the host
decides a conditional once, and a loop once an iteration; inside, the device does.

XLA prints the thunks after its passes. Whether the driver accepts a graph is not seen here.
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


# The types of thunks that XLA captures by default, as of JAX 0.11.
USUAL = ("FUSION", "CUBLAS", "CUBLASLT", "CUDNN", "CUSTOM_CALL", "DYNAMIC_SLICE_FUSION")
# Settings of the flag, by name: the types of thunks that are captured.
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
# Thunks that contain others, and thunks that only wait on the device.
_NO_LAUNCH = {"kAsyncStart", "kAsyncDone", "kDynamicSliceFusion", "kSequential"}


@dataclasses.dataclass(frozen=True)
class Graphs:
    """The launches in the text of a program, those of all branches.

    Attributes:
        captured: The number of launches in graphs.
        outside: The number of other launches, by kind.
        asks: The number of conditionals and loops that the host decides.
        graphs: The number of graphs.
    """

    captured: int
    outside: dict[str, int]
    asks: int
    graphs: int

    @property
    def whole(self) -> bool:
        """Whether the whole program is one graph."""
        return self.graphs == 1 and not self.outside and not self.asks

    @classmethod
    def of(cls, text: str) -> Self:
        """Counts the thunks that XLA has printed, one a line; contents are indented."""
        captured = asks = graphs = 0
        outside: collections.Counter[str] = collections.Counter()
        graph = None  # the indentation of the graph that contains the line, if any
        for line in text.splitlines():
            found = _THUNK.match(line)
            if found is None:
                continue  # the name of a branch
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
    """Returns `compiler_options` that capture thunks of these types, and no others."""
    return {"xla_gpu_enable_command_buffer": ",".join(commands)}


@contextlib.contextmanager
def printed(commands: tuple[str, ...]) -> Iterator[tuple[dict[str, str], list[Graphs]]]:
    """Yields the options to compile one program with, and a list.

    On exit, the `Graphs` of the program are appended to the list.
    """
    found: list[Graphs] = []
    with tempfile.TemporaryDirectory() as folder:
        yield options(commands) | {"xla_dump_to": folder}, found
        for name in ("thunk_sequence_after_thunk_passes", "thunk_sequence"):
            files = sorted(pathlib.Path(folder).glob(f"*.{name}.txt"))
            if files:  # XLA writes the first if its passes have changed anything
                break
        if len(files) != 1:
            raise ProgramError(f"XLA printed {len(files)} sequences of thunks, not one.")
        found.append(Graphs.of(files[0].read_text()))
