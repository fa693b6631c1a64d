"""The command `python -m sparsejax doctor`."""

import argparse
import os
import socket
import sys
import time
from typing import Any

import jax

from sparsejax.advise.doctor.examination import doctor, to_stderr
from sparsejax.advise.doctor.findings import WRONG, Finding
from sparsejax.advise.explain import command as explain_command
from sparsejax.errors import ArgumentError, JobError
from sparsejax.jobs import store
from sparsejax.jobs.start import coordinator
from sparsejax.schemes.forecast import Network


# Options that may differ by rank.
_BY_RANK = ("process", "coordinator", "json", "run")


def add(subparsers: Any) -> argparse.ArgumentParser:
    """Adds the command and its arguments to the command line."""
    parser = subparsers.add_parser(
        "doctor",
        help="say whether a machine or a job is fit to train, and what is wrong",
        description="Says which devices, kernels and network there are, whether the ranks "
        "of a job fit together, and what the synchronization of a model would cost on the "
        "network that is measured. Start it in the same way on every rank of a job; rank 0 "
        "prints. The exit status is 1 where something is wrong.",
    )
    explain_command.add_model(parser)
    parser.add_argument(
        "--gradient",
        metavar="MODULE:NAME",
        help="a pair (gradient function, batch), or a function that returns it, to see "
        "whether gradients are local",
    )
    parser.add_argument(
        "--ranks", type=int, help="how many ranks to plan for; those that there are"
    )
    parser.add_argument("--gbit-per-s", type=float, help="where it is not to be measured")
    parser.add_argument("--latency-us", type=float, help="where it is not to be measured")
    parser.add_argument(
        "--job",
        action="store_true",
        help="join the job of Slurm or Open MPI that runs this",
    )
    parser.add_argument("--coordinator", metavar="NAME:PORT", help="join this job")
    parser.add_argument("--processes", type=int, help="how many processes the job has")
    parser.add_argument("--process", type=int, help="the number of this one, from 0 on")
    parser.add_argument(
        "--one-host", action="store_true", help="all processes run on this host"
    )
    parser.add_argument(
        "--timeout", type=float, default=60.0, help="seconds to wait for others (60)"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    return parser


def run(options: argparse.Namespace) -> int:
    """Prints the report on rank 0; the exit status is the same on all ranks."""
    network = _network(options)
    try:
        _join(options)
    except JobError as error:
        # Each process prints it, because there is no job yet.
        print(Finding("job", WRONG, str(error)), file=sys.stderr)
        return 1
    try:
        status = _examine(options, network)
    except JobError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 1 if store.is_waiting() else 2
    if store.is_waiting():
        _leave(status)
    return status


def _leave(status: int) -> None:
    """Ends the process without JAX's shutdown, which waits for all and then aborts."""
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(2)  # Process 0 has the store, from which others may still read.
    os._exit(status)


def _network(options):
    """Returns the network of the options; None if it is to be measured."""
    numbers = options.gbit_per_s, options.latency_us
    if numbers == (None, None):
        return None
    if None in numbers:
        raise ArgumentError(
            "--gbit-per-s and --latency-us belong together: give both, or neither, and "
            "the network is measured."
        )
    return Network(*numbers)


def _examine(options, network):
    """Prints the report, and returns the exit status."""
    here = store.place()
    (tx, params), (grad_fn, batch) = _read(options)
    report = doctor(
        tx,
        params,
        grad_fn=grad_fn,
        batch=batch,
        ranks=options.ranks,
        network=network,
        density=explain_command.density(options),
        ids=explain_command.ids(options),
        arguments={k: v for k, v in vars(options).items() if k not in _BY_RANK},
        timeout=options.timeout,
        progress=to_stderr if here.process == 0 else None,
    )
    if here.process == 0:
        print(report.to_json() if options.json else report)
    return 1 if report.wrong else 0


def _join(options):
    """Joins the job that is named on the command line, if any."""
    named = options.coordinator, options.processes, options.process
    if named == (None, None, None):
        if options.job:
            _join_found(options)
        return
    if None in named or options.job:
        raise ArgumentError(
            "name a job by --coordinator, --processes and --process together, or by --job "
            "alone."
        )
    coordinator.check_coordinator(
        options.coordinator,
        options.processes,
        options.process,
        one_host=options.one_host,
        timeout=options.timeout,
    )
    jax.distributed.initialize(
        options.coordinator,
        options.processes,
        options.process,
        initialization_timeout=round(options.timeout),
    )


def _join_found(options):
    """Joins the job that JAX finds in the environment variables of a launcher."""
    coordinator.check_coordinator(timeout=options.timeout)
    try:
        jax.distributed.initialize(initialization_timeout=round(options.timeout))
    except ValueError as error:
        raise ArgumentError(
            f"--job: JAX finds no job of Slurm or Open MPI here ({error}): name it by "
            "--coordinator, --processes and --process."
        ) from None


def _read(options):
    """Returns the pairs (optimizer, parameters) and (gradient function, batch).

    If a process cannot read them, all raise, so that none waits for it.
    """
    why, model, gradient = "", (None, None), (None, None)
    try:
        if options.model or options.leaf or options.plan:
            model = explain_command.target(options)
        if options.gradient:
            gradient = explain_command.imported(options.gradient)
            if not (isinstance(gradient, tuple) and len(gradient) == 2):
                raise ArgumentError(
                    "--gradient must name a pair (gradient function, batch), or a function "
                    f"that returns it, got a {type(gradient).__name__}."
                )
            if model[1] is None:
                raise ArgumentError("--gradient needs a model, whose gradient it is.")
    except Exception as error:
        if store.place().processes == 1:
            raise
        why = f"{type(error).__name__}: {error}"
    own = {"host": socket.gethostname(), "why": why}
    answers = store.of_all("whether it has its model", own, options.timeout)
    for process, one in enumerate(answers):
        if one["why"]:
            raise JobError(
                f"process {process} on host {one['host']} cannot read its model: "
                f"{one['why']}"
            )
    return model, gradient
