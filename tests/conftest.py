"""Eight simulated CPU devices, fixed seeds, few programs at a time, and what needs a GPU
skipped without one.
"""

import functools
import gc
import os
import pathlib
import platform
import sys

import hypothesis
import jax
import pytest


# Before anything starts a backend: the number is fixed once one is up.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "standard")

# A fifth of the time that tracing takes: lines of code in programs, and looking for garbage
# among the many objects that JAX keeps.
jax.config.update("jax_traceback_in_locations_limit", 0)
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"  # in processes that tests start
gc.set_threshold(100_000, 50, 100)

# Compiling comes out of the first example's time, and fixed seeds make failures repeat.
hypothesis.settings.register_profile(
    "sparsejax", deadline=None, derandomize=True, database=None, max_examples=30
)
hypothesis.settings.load_profile("sparsejax")


@functools.cache
def _gpus():
    try:
        return tuple(jax.devices("gpu"))
    except RuntimeError:  # no such backend
        return ()


# Nearly all time goes into compiling. Without LLVM's optimizations that takes half as long,
# a tenth less without the passes that are left, and a sixth less where a program is not
# split into parts for threads that are busy anyway. What users run is compiled as XLA does
# by default: CI runs some tests so.
COMPILE_FAST = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
)
# Of the rest, two thirds go into MLIR for fusions, which XLA's older emitter does without:
# JAX 0.12 no longer has it, and ignores the option. It fuses otherwise, so no instruction
# may multiply and add at once: programs that do the same then have the same bits, as they
# have by default. Other processors have no name for that.
if platform.machine() in ("x86_64", "AMD64"):
    COMPILE_FAST += (
        "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
        "--xla_cpu_max_isa=AVX",
    )


def pytest_addoption(parser):
    parser.addoption(
        "--optimized", action="store_true", help="compile as for users, not for speed"
    )


def pytest_configure(config):
    if not config.option.optimized:
        os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *COMPILE_FAST])


# A program takes ten to a hundred of the 65,530 memory mappings that Linux gives to a
# process, and JAX keeps thousands of programs, as do the caches of tests. With none left,
# XLA's compiler crashes.
MAPPINGS_AT_MOST = 20_000
_COUNTED_EVERY = 25  # programs
_compiled = 0


def _count_program(event, _, **__):
    global _compiled
    _compiled += event.endswith("backend_compile_duration")


jax.monitoring.register_event_duration_secs_listener(_count_program)


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish():
    global _compiled
    if _compiled >= _COUNTED_EVERY:
        _compiled = 0
        if _mappings() > MAPPINGS_AT_MOST:
            _forget_programs()


def _mappings():
    try:
        return pathlib.Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:  # not Linux, which has no such limit
        return 0


def _forget_programs():
    jax.clear_caches()
    for name, module in list(sys.modules.items()):
        if name.startswith("tests."):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def pytest_report_header():
    return (
        f"jax {jax.__version__}, backend {jax.default_backend()}, "
        f"{len(jax.devices('cpu'))} CPU devices, {len(_gpus())} GPUs"
    )


def pytest_collection_modifyitems(items):
    if _gpus():
        return
    skip = pytest.mark.skip(reason="needs a GPU, and JAX sees none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture
def mesh_of():
    """From a number of ranks to a mesh of one axis over as many simulated devices."""
    from tests import helpers

    return helpers.mesh_of
