"""Steps compiled for sixteen H200s that are only described, each a host of its own."""

import pathlib
import tempfile
from typing import Any

import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from benchmarks.device import hlo
from benchmarks.kernels import h200
from benchmarks.schedule.model import AXIS
from benchmarks.schedule.timeline import Timeline


RANKS = 16
# Matrices are multiplied by cuBLAS: nothing is tuned without a GPU, and it compiles faster.
OPTIONS = {"xla_gpu_enable_triton_gemm": False}


def mesh() -> Mesh:
    """Sixteen hosts of one H200 each, which can be compiled for and nothing else."""
    # Slices, hosts of each, devices of each host.
    described = topologies.get_topology_desc(
        platform="cuda",
        topology_name="h200",
        target_config=h200.H200,
        topology=f"1x{RANKS}x1",
    )
    return Mesh(np.array(described.devices), (AXIS,), axis_types=(AxisType.Auto,))


def timeline(
    lowered: Any, hiding: bool, told: dict[str, float] | None = None, prior: float = 0.5
) -> Timeline:
    """The schedule that XLA makes of a step.

    Args:
        lowered: The step.
        hiding: Whether the latency-hiding scheduler makes it.
        told: The seconds of instructions, by name, which that scheduler is told in the file
            in which XLA takes those of a profiled run; else it goes by its own estimates.
        prior: The share of rows that are sent at once, where some are held back.
    """
    options: dict[str, Any] = dict(OPTIONS)
    options["xla_gpu_enable_latency_hiding_scheduler"] = hiding
    with tempfile.TemporaryDirectory() as folder:
        if told is not None:
            path = pathlib.Path(folder) / "costs.pbtxt"
            lines = [
                f'costs {{ name: "{name}" cost_us: {seconds * 1e6:.3f} }}\n'
                for name, seconds in told.items()
            ]
            path.write_text("".join(lines))
            options["xla_gpu_pgle_profile_file_or_directory_path"] = str(path)
        program = lowered.compile(compiler_options=options)
    return Timeline.of(hlo.parse(program.as_text()), prior)
