"""A lost process is found and named by all that are left, and so is one that left early."""

import errno
import itertools
import os
import re
import socket
import time
from unittest import mock

import pytest
from jax.errors import JaxRuntimeError

from sparsejax.errors import JobError
from sparsejax.jobs import store
from sparsejax.jobs.watch import context, hub
from sparsejax.jobs.watch.connections import Line, listening
from sparsejax.jobs.watch.hub import EventKind


HOSTS = {0: "a", 1: "b", 2: "c"}
TIMEOUT = 0.6


class Members:
    """Process 0 and two others, and what each is told to end for."""

    def __init__(self, silent=()):
        pairs = {process: socket.socketpair() for process in (1, 2)}
        self.told, self.released = {}, []
        lines = [Line(pair[0], process) for process, pair in pairs.items()]
        first = hub.Hub(lines, *self.common(0))
        self.sockets = {process: pair[1] for process, pair in pairs.items()}
        self.by = {0: first} | {
            process: hub.Spoke(Line(mine, 0), process, *self.common(process))
            for process, mine in self.sockets.items()
        }
        for process, member in self.by.items():
            if process not in silent:
                member.start()

    def common(self, process):
        """What the watchers of all processes are made of."""
        end = lambda why: self.told.setdefault(process, why)
        return HOSTS, TIMEOUT, end, lambda: self.released.append(process)

    def all_told(self, *ending):
        """Waits until these are told, and returns what, which is the same."""
        for process in ending:
            assert self.by[process].wait(10), (process, self.told)
        (why,) = {self.by[process].why for process in ending}
        return why

    def kill(self, process):
        """The kernel closes what a process had open; nothing of it is said any more."""
        self.by[process]._closed.set()
        self.sockets[process].shutdown(socket.SHUT_RDWR)


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Judges after a moment, and closes what is left open."""
    monkeypatch.setattr(hub, "SETTLE", 0.1)
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
    said = members.all_told(0, 1)
    assert said.startswith("process 2 on host c has sent no heartbeat for 0.6")


def test_all_know_that_process_0_is_lost():
    members = Members()
    members.by[0]._closed.set()
    for line in members.by[0]._lines.values():
        line.close()
    assert members.all_told(1, 2).startswith("process 0 on host a ended without a word")


def test_process_0_that_is_silent_is_lost():
    members = Members(silent=(0,))
    assert members.all_told(1, 2).startswith("process 0 on host a has sent no heartbeat")


def test_an_abort_is_the_cause_if_nothing_else_is():
    members = Members()
    members.by[1].happened_here(EventKind.FOLLOWED, "failed: connection closed")
    members.by[2].happened_here(EventKind.ABORTED, "was aborted")
    assert members.all_told(0, 1, 2) == "process 2 on host c was aborted"
    members = Members()
    members.by[2].happened_here(EventKind.ABORTED, "was aborted")
    members.by[1].happened_here(EventKind.FAILED, "failed: ValueError: no")
    assert members.all_told(0, 1, 2) == "process 1 on host b failed: ValueError: no"


def test_a_loss_is_the_cause_of_the_errors_before_it():
    members = Members()
    members.by[1].happened_here(EventKind.FOLLOWED, "failed: connection closed")
    members.by[0].happened_here(EventKind.FOLLOWED, "failed: connection closed")
    members.kill(2)
    assert members.all_told(0, 1).startswith("process 2 on host c ended without a word")


@pytest.mark.parametrize("process", [0, 2])
def test_an_error_of_a_script_is_the_cause_of_those_of_collectives(process):
    members = Members()
    members.by[1].happened_here(EventKind.FOLLOWED, "failed: connection closed")
    members.by[process].happened_here(EventKind.FAILED, "failed: ValueError: no")
    why = members.all_told(0, 1, 2)
    assert why == f"process {process} on host {HOSTS[process]} failed: ValueError: no"


def test_all_go_on_once_the_last_has_left():
    members = Members()
    time.sleep(2 * TIMEOUT)
    for process in (1, 2):
        members.by[process].leave()
    time.sleep(TIMEOUT / 2)
    assert not members.released
    members.by[0].leave()
    time.sleep(2 * TIMEOUT)
    assert sorted(members.released) == [0, 1, 2]
    assert not members.told


@pytest.mark.parametrize(
    ("leaving", "still"),
    [
        ((1,), "process 0 on host a, process 2 on host c are still in it"),
        ((2, 0), "process 1 on host b is still in it"),
    ],
)
def test_those_that_stay_in_the_block_are_named_to_all(leaving, still):
    members = Members()
    for process in leaving:
        members.by[process].leave()
        time.sleep(TIMEOUT / 4)
    why = members.all_told(0, 1, 2)
    first = f"process {leaving[0]} on host {HOSTS[leaving[0]]} left its block at "
    assert re.fullmatch(rf"{first}\d\d:\d\d:\d\d, and {still} 0\.6 s later: .*", why)
    assert members.told == dict.fromkeys((0, 1, 2), why)
    assert not members.released


def test_one_that_is_killed_as_it_waits_for_the_others_is_lost():
    members = Members()
    members.by[2].leave()
    time.sleep(TIMEOUT / 4)
    members.kill(2)
    assert members.all_told(0, 1).startswith("process 2 on host c ended without a word")


@pytest.mark.parametrize(
    ("kind", "text", "cause"),
    [
        (EventKind.FOLLOWED, "failed: Gloo timed out", "process 1 on host b left its "),
        (
            EventKind.FAILED,
            "failed: OSError: no",
            "process 2 on host c failed: OSError: no",
        ),
    ],
)
def test_one_that_left_is_the_cause_of_errors_of_collectives(
    monkeypatch, kind, text, cause
):
    monkeypatch.setattr(hub, "SETTLE", 2.0)
    members = Members()
    members.by[1].leave()
    time.sleep(TIMEOUT)
    members.by[2].happened_here(kind, text)
    assert members.all_told(0, 1, 2).startswith(cause)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            RuntimeError(
                "INTERNAL: CpuCallback error: Traceback (most recent call last):\n"
                "  File x\nValueError: a callback fails\n-----\nFor simplicity, JAX"
            ),
            "failed: RuntimeError: ValueError: a callback fails",
        ),
        (KeyboardInterrupt(), "failed: KeyboardInterrupt"),
        (ValueError("no.\nmore"), "failed: ValueError: no"),
    ],
)
def test_an_error_is_reported_by_its_cause_in_one_line(error, text):
    assert context._text(error) == text


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
            context.Watch(10.0, 0)._called(full, HOSTS)
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
        ([JaxRuntimeError("RESOURCE_EXHAUSTED: no"), RuntimeError("a step")], False),
        ([KeyError("x"), ValueError("a bad batch")], False),
    ],
)
def test_an_error_follows_that_comes_of_a_collective_which_lost_another(errors, follows):
    assert context._follows(raised(*errors)) == follows


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (SystemExit(0), "called sys.exit(0) inside its block, which all processes must"),
        (SystemExit(), "called sys.exit() inside its block, which all processes must"),
        (SystemExit("error: no data\nsee"), "failed: error: no data"),
        (ValueError("a\nb"), "failed: ValueError: a"),
        (KeyboardInterrupt(), "failed: KeyboardInterrupt"),
    ],
)
def test_the_sentence_says_how_a_block_was_left(error, text):
    said = context._text(error)
    assert said.startswith(text)
    assert "\n" not in said


@pytest.fixture
def in_block(monkeypatch):
    """A block whose watcher is made up, in a process that nothing ends."""
    block = context.Watch(0.1, 0)
    block._watcher = mock.Mock(is_forked=False)
    monkeypatch.setattr(context, "SETTLE", 0.0)
    monkeypatch.setattr(block, "_end", lambda: None)
    return block


def test_an_interrupt_while_it_waits_for_the_others_is_an_error(in_block):
    in_block._watcher.leave.side_effect = KeyboardInterrupt
    in_block.__exit__(None, None, None)
    in_block._watcher.fail.assert_called_once_with("failed: KeyboardInterrupt", False)


def test_a_script_that_ends_in_its_block_has_not_left_it(in_block, monkeypatch):
    said = [{"host": "a", "port": 1}, {"host": "b"}]
    at_exit = {}
    monkeypatch.setattr(context.store, "place", lambda: store.Place(1, 2, "a:1"))
    monkeypatch.setattr(context.store, "of_all", lambda *_: said)
    monkeypatch.setattr(context, "WatcherProcess", lambda *_: in_block._watcher)
    monkeypatch.setattr(in_block, "_connected", lambda *_: None)
    monkeypatch.setattr(context.atexit, "register", at_exit.setdefault)
    monkeypatch.setattr(context.atexit, "unregister", at_exit.pop)
    with in_block:
        ((function, text),) = at_exit.items()
        function(text)
        in_block._watcher.fail.assert_called_once_with(text, False)
        assert text == "ended its script inside its block"
    assert not at_exit


def test_process_0_listens_at_the_port_that_is_named(monkeypatch):
    with listening(0) as free:
        port = free.getsockname()[1]
    others, came = [], []

    def of_all(_, own, timeout):
        assert own["port"] == port
        other = Line(socket.create_connection(("localhost", port), timeout), 0)
        other.say(process=1)
        others.append(other)
        return [own, {"host": "b"}]

    def beside(lines, *_):
        came.extend(lines)
        return mock.Mock(is_forked=False)

    monkeypatch.setattr(context.store, "place", lambda: store.Place(0, 2, "a:1"))
    monkeypatch.setattr(context.store, "of_all", of_all)
    monkeypatch.setattr(context, "WatcherProcess", beside)
    monkeypatch.setattr(context.Watch, "_wait", lambda self: None)
    with context.watch_job(10.0, port=port):
        assert [line.process for line in came] == [1]
        assert others[0].read(10) == {"here": True}
    for line in (*came, *others):
        line.close()


@pytest.mark.parametrize("code", [0, "no data"])
def test_a_script_that_exits_in_its_block_has_not_left_it(in_block, code):
    in_block.__exit__(SystemExit, SystemExit(code), None)
    in_block._watcher.leave.assert_not_called()
    in_block._watcher.fail.assert_called_once()
