"""Each way in which a process ends, or leaves its block early, ends the job by its name.

The victim is process 0, whose end is the hardest to tell: the coordinator is in it, and it
is process 0 that tells the others. Of each kind of end one befalls another process, too.
Jobs are of one kind each: the words for each exit, error and signal are in `test_watch` and
`test_sidecar`.
"""

import concurrent.futures
import signal
import time

import pytest

from tests.helpers import processes
from tests.jobs.watched_worker import BEFALLEN, ENDS, GOES_ON, LEAVES, TIMEOUT


pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]
ALLOWED = 10.0  # seconds, beside those of silence, on a machine that is busy
AT_ONCE = 3
JOB = "tests.jobs.watched_worker"
# What befalls process 1 as well, and what befalls it instead.
BOTH = {"raise", "SIGKILL"}
SECOND = {"return", "the script ends", "SIGKILL, the others abort"}
# Of three processes the third hears of process 0 by itself, of process 1 by process 0.
OF_THREE = {"abort", "the script ends"}


def some_at_once(table):
    """The names in a table, three to a test: their jobs wait more than they compute."""
    names = [*table]
    return [names[first : first + AT_ONCE] for first in range(0, len(names), AT_ONCE)]


def jobs_of(faults):
    """By fault what `jobs` gives, of jobs that run at the same time."""
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        yield from zip(faults, pool.map(jobs, faults), strict=True)


def jobs(fault):
    """By victim the statuses and texts of the processes of a job, and its seconds."""
    victims = (0, 1) if fault in BOTH else (int(fault in SECOND),)
    started = [start(fault, victim) for victim in victims]
    try:
        return dict(zip(victims, map(ended, started), strict=True))
    finally:
        for process in [process for job in started for process in job]:
            process.kill()


def start(fault, victim):
    address, ranks = processes.free_address(), 3 if fault in OF_THREE else 2
    return [processes.fork(JOB, n, ranks, address, fault, victim) for n in range(ranks)]


def ended(job):
    texts = [process.communicate(timeout=60)[0] for process in job]
    end, codes = time.time(), [process.returncode for process in job]
    (befallen,) = [
        float(line.removeprefix(BEFALLEN))
        for text in texts
        for line in text.splitlines()
        if line.startswith(BEFALLEN)
    ]
    return codes, texts, end - befallen


def sentence(text):
    """The one sentence of a process for which the job ends."""
    assert text.count("sparsejax: ") == 1, text
    return text.partition("sparsejax: ")[2]


def ended_by_library(code):
    """Whether a process was ended so; without its coordinator JAX may abort it first."""
    return code in (1, -signal.SIGABRT)


@pytest.mark.parametrize("faults", some_at_once(ENDS), ids=", ".join)
def test_a_process_that_ends_in_its_block_ends_all_by_its_name(faults):
    for fault, by_victim in jobs_of(faults):
        way = ENDS[fault]
        for victim, (codes, texts, seconds) in by_victim.items():
            assert seconds < ALLOWED + way.silent * TIMEOUT, texts
            for rank, (code, text) in enumerate(zip(codes, texts, strict=True)):
                assert sentence(text).startswith(f"process {victim} on host "), text
                assert way.says in sentence(text)
                wanted = way.status if rank == victim else way.others
                right = code == wanted or (wanted in (1, None) and ended_by_library(code))
                assert right, (fault, code, text)


@pytest.mark.parametrize("faults", some_at_once(LEAVES), ids=", ".join)
def test_a_process_that_leaves_before_the_others_ends_all_by_its_name(faults):
    for _, by_victim in jobs_of(faults):
        for victim, (codes, texts, seconds) in by_victim.items():
            assert seconds < TIMEOUT + ALLOWED, texts
            for code, text in zip(codes, texts, strict=True):
                assert ended_by_library(code), text
                assert sentence(text).startswith(f"process {victim} on host "), text
                left, _, still = sentence(text).partition(f", and process {1 - victim} on ")
                assert "left its block at " in left
                assert "is still in it 4 s later: all processes must take the same" in still


@pytest.mark.parametrize("faults", some_at_once(GOES_ON), ids=", ".join)
def test_a_job_goes_on_to_its_end(faults):
    for fault, by_victim in jobs_of(faults):
        for codes, texts, _ in by_victim.values():
            assert codes == [0, 0], (fault, texts)
            assert "sparsejax: " not in "".join(texts)
            if fault == "SIGTERM, and all save":
                (first, second) = [text.partition("saved at step ")[2] for text in texts]
                assert first.split()[0] == second.split()[0]
