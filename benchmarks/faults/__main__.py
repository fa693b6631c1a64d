"""Runs all cases, and says what became of each."""

import dataclasses
import functools
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time

from benchmarks.faults import verdicts
from benchmarks.faults.kinds import FAULTS
from benchmarks.faults.settings import LOCAL, Settings
from benchmarks.harness.record import Recorder
from benchmarks.harness.table import Column
from benchmarks.testbed import job, network


NAME = "faults"
KEYS = ("scheme", "fault", "hosts", "seed", "moment")
ROUNDING = 1e-5  # of the sum of sizes of what was computed
GRACE = 40.0  # seconds until what still runs is a hang
SAID = "sparsejax: "  # with which the sentence begins for which a job ends


def main(argv: list[str] | None = None) -> int:
    settings = Settings.parse(argv)
    folder = pathlib.Path(settings.out) if settings.out else None
    record = Recorder(NAME, settings.command(), KEYS, folder)
    cases = settings.cases()
    rows = (
        (
            f"{number} of {len(cases)}: {one.scheme}, {one.fault}, {one.moment}",
            case(one),
        )
        for number, one in enumerate(cases, start=1)
    )
    return verdicts.judge(
        record, rows, COLUMNS, "What became of jobs in which a host was befallen"
    )


def case(settings: Settings) -> dict:
    """A row: one scheme, one fault, and what became of the job."""
    drawn = random.Random(f"{settings.seed} {settings.scheme} {settings.fault}")
    fault = FAULTS[settings.fault]
    steps = settings.candidates()
    if not fault.ends:
        # What a job survives must happen before its last step is over.
        steps = [step for step in steps if step < settings.steps - 1]
    if not steps:
        raise ValueError(
            f"no step of {settings.steps} is left for the fault {fault.name!r} at moment "
            f"{settings.moment!r}: give more by --steps"
        )
    at = drawn.choice(steps)
    lost = drawn.randrange(settings.hosts)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="faults-"))
    settings = dataclasses.replace(settings, at=at, lost=lost, folder=str(folder))
    row = {"scheme": settings.scheme, "fault": fault.name, "hosts": settings.hosts}
    row |= {"seed": settings.seed, "silence": settings.silence, "at": at, "befallen": lost}
    if settings.scheme in LOCAL:
        row["moment"] = settings.moment
    try:
        with network.hosts(settings.hosts, settings.rate) as net:
            row["shaped"] = net is not None
            if fault.of_network and net is None:
                return row | {"wrong": "not tried: it needs network namespaces, and root"}
            wrong = _ended(settings, fault, net, row) if fault.ends else []
            if fault.ends and not wrong:
                wrong = _resumed(settings, net, row)
            if not fault.ends:
                outcome, _ = _run(settings, net)
                wrong = _done(settings, outcome, row, settings.hosts)
                wrong += _too_late(outcome)
                wrong += _unlike_clean(settings, outcome, "done")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return row | {"wrong": "; ".join(wrong)}


@functools.cache
def _anchors(settings):
    """The hash of parameters after each step of a run that nothing befell."""
    folder = tempfile.mkdtemp(prefix="faults-")
    try:
        outcome, _ = _run(dataclasses.replace(settings, folder=folder), None)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {line["clean"]: line["digest"] for line in _reported(outcome, "clean")}


def _reported(outcome, key):
    """The lines with this key that hosts have reported, by host."""
    return [line for rows in outcome.rows for line in rows if key in line]


def _unlike_clean(settings, outcome, key):
    """What is wrong with anchors of local steps beside those of a run without a fault."""
    if settings.scheme not in LOCAL:
        return []
    fields = ("scheme", "hosts", "steps", "every", "silence", "seed")
    clean = _anchors(Settings(**{name: getattr(settings, name) for name in fields}))
    lines = _reported(outcome, key)
    unlike = [line[key] for line in lines if line["digest"] != clean.get(line[key])]
    return [f"another anchor than without the fault at step {unlike[0]}"] if unlike else []


def _run(settings, net):
    """The outcome of a job, and the files that the hosts write their logs to."""
    ranks = settings.hosts - settings.phase
    environment = settings.environment() | {"PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-m", "benchmarks.testbed.ranks", "benchmarks.faults.rank"]
    outcome = job.run(command, ranks, net, 300.0, environment=environment, grace=GRACE)
    folder = pathlib.Path(settings.folder)
    return outcome, [folder / f"{settings.phase}-{rank}.txt" for rank in range(ranks)]


def _said(logs, until):
    """What each host says at last, as soon as all of them do, else at a given time.

    Where gloo or JAX has aborted processes, their watchers are there a moment longer.
    """
    while True:
        texts = [log.read_text(errors="replace") if log.exists() else "" for log in logs]
        if all(SAID in text for text in texts) or time.time() > until:
            return [text.rpartition(SAID)[2] if SAID in text else "" for text in texts]
        time.sleep(0.02)


def _too_late(outcome):
    """What is wrong with the time of a fault that a job survives."""
    over, trained = (
        [line[key] for line in _reported(outcome, key)] for key in ("befallen", "trained")
    )
    if over and over[0] < min(trained, default=0.0):
        return []
    return ["the fault did not happen while all hosts trained"]


def _ended(settings, fault, net, row):
    """What is wrong with how a job ended that a fault was to end."""
    outcome, logs = _run(settings, net)
    told = [line["befallen"] for line in _reported(outcome, "befallen")]
    if not told:
        return [f"the fault did not happen: {outcome.why}"]
    within = fault.within(settings.silence)
    sentences = _said(logs, told[0] + within)
    row["ended"] = time.time() - told[0]
    wrong = [f"host {rank} hung" for rank, code in enumerate(outcome.codes) if code is None]
    if row["ended"] > within:
        wrong.append(f"ended after {row['ended']:.1f} s, and not within {within:g}")
    for rank, sentence in enumerate(sentences):
        # To a host that is cut off it is process 0 that is silent, and so it is to all
        # others where that is the one.
        is_cut = fault.cuts and (rank == settings.lost or settings.lost == 0)
        name = "process " if is_cut else f"process {settings.lost} on host"
        if not sentence.startswith(name):
            said = sentence[:80] or logs[rank].read_text(errors="replace")[-400:]
            wrong.append(f"host {rank}, status {outcome.codes[rank]}, says {said!r}")
    aborted = [rank for rank, code in enumerate(outcome.codes) if code == -signal.SIGABRT]
    if aborted:
        row["aborted"] = aborted
    return wrong


def _resumed(settings, net, row):
    """What is wrong with how the hosts that are left go on."""
    kept = max(
        (
            int(path.name[5:])
            for path in pathlib.Path(settings.folder).glob("step-*")
            if path.name[5:].isdigit()
        ),
        default=0,
    )
    if net is not None:
        net.hosts.append(net.hosts.pop(settings.lost))
    again = dataclasses.replace(settings, phase=1, resumed=kept)
    outcome, _ = _run(again, net)
    row["kept"] = kept
    restored = _reported(outcome, "restored")
    wrong = []
    if [line["restored"] for line in restored] != [kept] * (settings.hosts - 1):
        wrong.append(f"restored {[line['restored'] for line in restored]}, not {kept}")
    if any(line["lost"] > ROUNDING for line in restored):
        wrong.append(f"lost at the checkpoint: {max(x['lost'] for x in restored):.1e}")
    wrong += _unlike_clean(settings, outcome, "restored")
    return wrong + _done(settings, outcome, row, settings.hosts - 1)


def _done(settings, outcome, row, hosts):
    """What is wrong with the end of a job that was to take all its steps."""
    done = _reported(outcome, "done")
    if outcome.status or [line["done"] for line in done] != [settings.steps] * hosts:
        return [f"did not take all steps: {outcome.why}"]
    row["lost"] = max(line["lost"] for line in done)
    wrong = []
    if row["lost"] > ROUNDING:
        wrong.append(f"lost at the end: {row['lost']:.1e}")
    if len({line["digest"] for line in done}) > 1:
        wrong.append("replicas differ")
    return wrong


COLUMNS = [
    Column("scheme", "scheme"),
    Column("fault", "fault"),
    Column("moment", "moment"),
    Column("host", "befallen"),
    Column("at step", "at"),
    Column("ended after s", "ended", ".1f"),
    Column("went on from", "kept"),
    Column("lost", "lost", ".0e"),
    Column("ended by gloo", lambda row: len(row.get("aborted", ())) or None),
    Column("", "wrong"),
]


if __name__ == "__main__":
    sys.exit(main())
