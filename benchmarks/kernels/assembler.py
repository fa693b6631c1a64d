"""Assembles PTX as a driver would before a launch, with the ptxas that Triton brings."""

import dataclasses
import os
import pathlib
import re
import subprocess


# A processor has 65,536 registers and room for 2,048 threads; with 64 a thread half of that
# run at a time.
REGISTERS = 64


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The figures of ptxas for a kernel.

    Attributes:
        name: Of its function.
        registers: Of a thread.
        spilled: Bytes of registers that a thread keeps in memory, stores and loads.
    """

    name: str
    registers: int
    spilled: int


def assembled(path: pathlib.Path) -> list[Kernel]:
    """The kernels of a file of PTX; CalledProcessError where it cannot be assembled."""
    import triton  # pyright: ignore[reportMissingImports]

    tools = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    target = re.search(r"^\.target (\w+)", path.read_text(), re.MULTILINE)
    command = [tools / "ptxas", "-v", path, "-o", os.devnull]
    command += [f"-arch={target[1]}"] if target else []
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    # For each kernel a line with its name, one on spills, one on registers.
    return [
        Kernel(
            lines.split("'")[1],
            int(re.search(r"Used (\d+) registers", lines)[1]),
            sum(map(int, re.findall(r"(\d+) bytes spill", lines))),
        )
        for lines in done.stderr.split("Compiling entry function")[1:]
    ]
