"""A lost process is found and named, by all that are left; who leaves in peace is not."""

import errno
import itertools
import os
import signal
import socket
import time
from unittest import mock

import pytest
from jax.errors import JaxRuntimeError

from sparsejax.errors import JobError
from sparsejax.wire.job import watch, watchers
from sparsejax.wire.job.lines import Line, listening
from sparsejax.wire.job.watchers import Kind
from tests.helpers import processes
from tests.wire.job import watched_worker


HOSTS = {0: "a", 1: "b", 2: "c"}
TIMEOUT = 0.6


class Members:
    """Process 0 and two others, and what each is told to end for."""

    def __init__(self, silent=()):
        pairs = {process: socket.socketpair() for process in (1, 2)}
        self.told = {}
        end = lambda process: lambda why: self.told.setdefault(process, why)
        lines = [Line(pair[0], process) for process, pair in pairs.items()]
        hub = watchers.Hub(lines, HOSTS, TIMEOUT, end(0))
        self.sockets = {process: pair[1] for process, pair in pairs.items()}
        self.by = {0: hub} | {
            process: watchers.Spoke(Line(mine, 0), process, HOSTS, TIMEOUT, end(process))
            for process, mine in self.sockets.items()
        }
        for process, member in self.by.items():
            if process not in silent:
                member.start()

    def all_told(self, *ending):
        """Waits until these are told, and returns what, which is the same."""
        for process in ending:
            assert self.by[process].wait(10), (process, self.told)
        (why,) = {self.by[process].why for process in ending}
        return why

    def kill(self, process):
        """The kernel closes what a process had open; nothing of it is said any more."""
        self.by[process].close()
        self.sockets[process].shutdown(socket.SHUT_RDWR)


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Judges after a moment, and closes what is left open."""
    monkeypatch.setattr(watchers, "SETTLE", 0.1)
    opened = []
    pair = socket.socketpair
    monkeypatch.setattr(socket, "socketpair", lambda: opened.append(pair()) or opened[-1])
    yield
    for each in itertools.chain(*opened):
        each.close()


def test_one_that_ends_is_named_to_all():
    members = Members()
    members.kill(2)
    why = members.all_told(0, 1)
    assert why.startswith("process 2 on host c ended without a word")
    assert members.told == {0: why, 1: why}


def test_one_that_is_silent_is_named_to_all():
    members = Members(silent=(2,))
    assert members.all_told(0, 1).startswith("process 2 on host c has said nothing for 0.6")


def test_all_know_that_process_0_is_lost():
    members = Members()
    members.by[0].close()
    for line in members.by[0]._lines.values():
        line.close()
    assert members.all_told(1, 2).startswith("process 0 on host a ended without a word")


def test_process_0_that_is_silent_is_lost():
    members = Members(silent=(0,))
    assert members.all_told(1, 2).startswith("process 0 on host a has said nothing")


def test_an_abort_is_the_cause_if_nothing_else_is():
    members = Members()
    members.by[1].happened_here(Kind.FOLLOWED, "failed: connection closed")
    members.by[2].happened_here(Kind.ABORTED, "was aborted")
    assert members.all_told(0, 1, 2) == "process 2 on host c was aborted"
    members = Members()
    members.by[2].happened_here(Kind.ABORTED, "was aborted")
    members.by[1].happened_here(Kind.FAILED, "failed: ValueError: no")
    assert members.all_told(0, 1, 2) == "process 1 on host b failed: ValueError: no"


def test_a_loss_is_the_cause_of_the_errors_before_it():
    members = Members()
    members.by[1].happened_here(Kind.FOLLOWED, "failed: connection closed")
    members.by[0].happened_here(Kind.FOLLOWED, "failed: connection closed")
    members.kill(2)
    assert members.all_told(0, 1).startswith("process 2 on host c ended without a word")


@pytest.mark.parametrize("process", [0, 2])
def test_an_error_of_a_script_is_the_cause_of_those_of_collectives(process):
    members = Members()
    members.by[1].happened_here(Kind.FOLLOWED, "failed: connection closed")
    members.by[process].happened_here(Kind.FAILED, "failed: ValueError: no")
    why = members.all_told(0, 1, 2)
    assert why == f"process {process} on host {HOSTS[process]} failed: ValueError: no"


def test_nobody_is_lost_who_is_there_or_done():
    members = Members()
    time.sleep(2 * TIMEOUT)
    members.by[1].leave()
    time.sleep(2 * TIMEOUT)
    members.by[0].leave()
    members.by[2].leave()
    time.sleep(2 * TIMEOUT)
    assert not members.told


def test_words_of_strangers_end_a_line_and_no_process():
    ours, other = socket.socketpair()
    line = Line(ours, 1)
    other.sendall(b'{"here": true}\n[1]\n')
    assert list(line.heard(1.0)) == [{"here": True}]
    other.sendall(b"x" * 70_000)
    assert line.read(1.0) is None


def test_a_line_that_this_end_has_closed_is_at_its_end():
    line = Line(socket.socketpair()[0], 1)
    line.close()  # As the thread does that sees a process end, at any time.
    assert line.read(1.0) is None


def test_too_many_files_on_process_0_are_said_to_all():
    with listening(0) as server:
        other = socket.create_connection(("localhost", server.getsockname()[1]))
        Line(other, 0).say(process=1)
        first = [server.accept()]

        def accept():
            if first:
                return first.pop()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        full = mock.Mock(accept=accept)
        with pytest.raises(JobError, match=r"process 0 on host a .* 2 conn.*ulimit -n"):
            watch.Watch(10.0, 0)._called(full, HOSTS)
    (said,) = Line(other, 0).heard(10)
    assert "ulimit -n" in said["why"]
    other.close()


def raised(*errors):
    """The last of some errors, each raised while the one before was handled."""
    try:
        raise errors[-1]
    except BaseException as error:
        error.__context__ = raised(*errors[:-1]) if errors[1:] else None
        return error


@pytest.mark.parametrize(
    ("errors", "follows"),
    [
        ([JaxRuntimeError("UNKNOWN: Gloo all-reduce failed")], True),
        ([JaxRuntimeError("UNKNOWN: Gloo"), OSError("no checkpoint")], True),
        ([JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")], False),
        ([JaxRuntimeError("RESOURCE_EXHAUSTED: no"), RuntimeError("a step")], False),
        ([KeyError("x"), ValueError("a bad batch")], False),
    ],
)
def test_an_error_follows_that_comes_of_a_collective_which_lost_another(errors, follows):
    assert watch._follows(raised(*errors)) == follows


def test_a_status_is_told_as_the_call_that_ended_the_script():
    assert watch._text(SystemExit(3)) == "sys.exit(3)"
    assert watch._text(SystemExit("error: no data")) == "error: no data"


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("fault", watched_worker.FAULTS)
def test_processes_end_with_the_name_of_the_lost_one(fault):
    address, lost = processes.free_address(), 0 if fault == "kill 0" else 1
    started = [
        processes.start("tests.wire.job.watched_worker", rank, 3, address, fault)
        for rank in range(3)
    ]
    try:
        texts = [process.communicate(timeout=90)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    codes = [process.returncode for process in started]
    if fault in ("none", "pause"):
        assert codes == [0, 0, 0], texts
        return
    for rank, (code, text) in enumerate(zip(codes, texts, strict=True)):
        # Where process 0 and its coordinator are gone, JAX aborts the others as well.
        expected = {-signal.SIGABRT, 1}
        if rank == lost and fault in ("kill", "kill 0", "kill, and abort", "stop"):
            expected = {-signal.SIGKILL}
        elif fault == "kill, and abort":
            expected = {-signal.SIGABRT}
        assert code in expected, text
        sentence = text.partition("sparsejax: ")[2]
        assert sentence.startswith(f"process {lost} on host "), text
        assert watched_worker.FAULTS[fault] in sentence
        assert "sparsejax: " not in sentence  # It is printed once.
