"""Algorithm 1 of Zen in C++, for comparison."""

import ctypes
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable

import numpy as np

from benchmarks.harness.record import say
from pallas_kernels import HashMemory


def partition_in_cpp(
    indices: np.ndarray, seeds: np.ndarray, memory: HashMemory
) -> Callable[[], tuple[np.ndarray, int]] | None:
    """A function that runs it with two threads; None without a compiler.

    The function returns the memory, and the number of indices that are left.
    """
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        say("  no C++ compiler: Algorithm 1 in C++ is left out")
        return None
    with tempfile.TemporaryDirectory() as folder:
        library = pathlib.Path(folder) / "partition.so"
        source = pathlib.Path(__file__).with_name("partition.cc")
        command = [compiler, "-std=c++20", "-O3", "-march=native", "-shared", "-fPIC"]
        command += ["-pthread", source, "-o", library]
        subprocess.run(command, check=True)
        function = ctypes.CDLL(str(library)).partition
    function.restype = ctypes.c_int64
    places = np.empty((memory.parts, memory.room), np.int32)
    counts = np.empty(memory.parts, np.int32)
    seeds = np.ascontiguousarray(seeds, np.uint32)
    at = lambda array: ctypes.c_void_p(array.ctypes.data)
    number = memory.parts, memory.hashes, memory.slots, memory.serial

    def run():
        left = function(
            at(indices),
            ctypes.c_int64(indices.size),
            at(seeds),
            *map(ctypes.c_int32, [*number, 2]),
            at(places),
            at(counts),
        )
        return places, left

    return run
