"""Joins a job of several processes, checks that they fit together, and runs a module in it.

    python -m examples.multi_host.start [--coordinator NAME:PORT] MODULE [ARGUMENTS]

Under Slurm and Open MPI 4 JAX finds the coordinator, the number of processes and their
ranks. Elsewhere they are arguments, or variables that the launcher sets (see `RANKS` and
`SIZES`). A job that cannot train ends here, on all hosts, with the reason. So does a job
whose module fails on a host, or ends there long before it ends on the others, or that loses
a host, since the others would wait.
"""

import argparse
import os
import runpy
import sys
import time
import traceback
from typing import Any

import jax

import sparsejax
from sparsejax.errors import SparsejaxError


# Of Kubernetes' indexed jobs, Open MPI, and MPICH and its relatives.
RANKS = ("JOB_COMPLETION_INDEX", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
# A process on a host with several sees the device of this number alone. JAX does the same.
PLACES_ON_HOST = ("OMPI_COMM_WORLD_LOCAL_RANK",)


def main(argv: list[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    if options.devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.devices)
    try:
        join(options)
        sys.argv = [options.module, *options.arguments]
        with sparsejax.advise.watch_job(timeout=options.silence):
            run(options.module)
    except SparsejaxError as error:
        _end(f"error: {error}", 1)
    except SystemExit as end:
        _end(end.code if isinstance(end.code, str) else "", end.code)
    except BaseException:
        _end(traceback.format_exc(), 1)


def join(options: argparse.Namespace) -> None:
    """Joins the job, and checks it before and after `jax.distributed.initialize`."""
    known: dict[str, Any] = {
        "coordinator_address": options.coordinator,
        "num_processes": _first(options.processes, SIZES) if options.coordinator else None,
        "process_id": _first(options.process, RANKS) if options.coordinator else None,
    }
    if None not in known.values():
        sparsejax.advise.check_coordinator(
            options.coordinator,
            known["num_processes"],
            known["process_id"],
            one_host=options.one_host,
            timeout=options.timeout,
        )
        # There is nothing left to find out, and Kubernetes would be asked.
        known["cluster_detection_method"] = "deactivate"
        place = _first(None, PLACES_ON_HOST)
        if place is not None and "JAX_LOCAL_DEVICE_IDS" not in os.environ:
            known["local_device_ids"] = [place]
    elif options.coordinator is None:
        sparsejax.advise.check_coordinator(timeout=options.timeout)
    try:
        jax.distributed.initialize(**known, initialization_timeout=options.timeout)
    except ValueError as error:  # JAX found no launcher, or not all of it.
        _end(f"error: {error} Give --coordinator, --processes and --process.", 2)
    given = [options.module, *options.arguments]
    sparsejax.check_job(arguments=given, timeout=options.timeout)


def run(module: str) -> None:
    """Runs a module; `sys.exit(0)`, with which many modules end, is not a failure."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code:
            raise


def _first(given: int | None, names: tuple[str, ...]) -> int | None:
    """The given number, else that of the first of these variables that is set."""
    found = [os.environ[name] for name in names if os.environ.get(name)]
    return given if given is not None or not found else int(found[0])


def _end(message: str, status: Any) -> None:
    """Ends the process at once: a regular shutdown would wait for the others."""
    if message:
        print(message, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    if jax.distributed.is_initialized():
        time.sleep(2)  # The coordinator lives in process 0: others may still have to read.
    os._exit(status if isinstance(status, int) else 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.multi_host.start", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add(
        "--coordinator",
        default=os.environ.get("JAX_COORDINATOR_ADDRESS"),
        metavar="NAME:PORT",
        help="the host of process 0, and a free port on it (JAX_COORDINATOR_ADDRESS)",
    )
    add("--processes", type=int, help="the number of processes")
    add("--process", type=int, help="the number of this one, from 0 on")
    add("--one-host", action="store_true", help="all processes run on this host")
    add("--devices", type=int, help="simulated devices of each process, for a trial")
    add("--timeout", type=int, default=120, help="seconds to wait for others (120)")
    add(
        "--silence",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="a process that is silent for this long is lost, and ends the job; so does "
        "one whose module still runs this long after that of another ended (60)",
    )
    add("module", help="what to run, as in python -m MODULE")
    add("arguments", nargs=argparse.REMAINDER, help="of the module")
    return parser


if __name__ == "__main__":
    main()
