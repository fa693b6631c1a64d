"""The watcher beside a process: how the process ended, and what becomes of both."""

import contextlib
import io
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading

import pytest

from sparsejax.errors import JobError
from sparsejax.jobs import store
from sparsejax.jobs.watch import client, ending, sidecar
from sparsejax.jobs.watch.connections import Line, listening
from sparsejax.jobs.watch.context import watch_job
from sparsejax.jobs.watch.hub import EventKind


@pytest.fixture
def watched():
    """Starts a program with one end of a pair of sockets; returns it, and as watched."""
    started, sockets = [], []

    def start(code):
        ours, other = socket.socketpair()
        sockets.append(ours)
        command = [sys.executable, "-I", "-S", "-c", f"import os, time\n{code}"]
        started.append(subprocess.Popen(command, pass_fds=[other.fileno()]))
        other.close()
        return started[-1], ending.Process(started[-1].pid, Line(ours, 1))

    yield start
    for process in started:
        process.kill()
        process.wait()
    for each in sockets:
        each.close()


@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [
        ("os.kill(os.getpid(), 9)", EventKind.LOST, "was killed (SIGKILL)"),
        ("os.kill(os.getpid(), 15)", EventKind.LOST, "was ended by SIGTERM"),
        (
            "os.abort()",
            EventKind.ABORTED,
            "was aborted (SIGABRT), often because processes made different calls or gave",
        ),
        ("os._exit(3)", EventKind.ABORTED, "ended with status 3"),
    ],
)
def test_it_knows_how_its_process_ended(watched, code, kind, text):
    _, seen = watched(code)
    assert seen.line.read(10) is None
    seen.closed()
    told, words = seen.how()
    assert told == kind
    assert words.startswith(text)


def newer_linux():
    """Whether the system tells how a process ended whose parent has read it."""
    return sys.platform == "linux" and [*map(int, re.findall(r"\d+", os.uname().release))][
        :2
    ] >= [6, 15]


@pytest.mark.skipif(not newer_linux(), reason="older systems do not tell")
def test_launchers_that_wait_do_not_hide_how_a_process_ended(watched):
    process, seen = watched("time.sleep(0.3); os.abort()")
    process.wait()
    assert seen.line.read(10) is None
    told, words = seen.how()
    assert told == EventKind.ABORTED
    assert "SIGABRT" in words


def test_an_end_that_the_system_does_not_tell_was_without_a_word(monkeypatch, watched):
    monkeypatch.setattr(ending, "_GET_INFO", 0)  # as if the system did not know it
    process, seen = watched("os.abort()")
    process.wait()
    assert seen.line.read(10) is None
    assert seen.how() == (
        EventKind.LOST,
        "ended without a word: it was killed or aborted, or its memory was full",
    )


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the end itself is not seen here")
def test_children_that_were_forked_do_not_hide_an_end(watched):
    _, seen = watched(
        "child = os.fork()\n"
        "if child == 0: time.sleep(4); os._exit(0)\n"
        "os.kill(os.getpid(), 9)"
    )
    assert seen.line.read(2) is None


def test_one_that_does_not_end_is_killed(monkeypatch, watched):
    process, seen = watched("time.sleep(60)")
    seen.end(0.0)
    assert process.poll() is None  # It has another parent than this process has.
    monkeypatch.setattr(os, "getppid", lambda: process.pid)
    seen.end(0.0)
    assert process.wait(10) == -signal.SIGKILL


@pytest.fixture
def beside():
    """The end of a line that process 0 has, and the watcher of process 1."""
    ours, other = socket.socketpair()
    hub = Line(ours, 1)
    yield hub, client.WatcherProcess([Line(other, 0)], 1, {0: "a", 1: "b"}, 4.0)
    hub.close()


@contextlib.contextmanager
def leaving(leave):
    """The block of another thread that leaves one, and waits until all have left theirs."""
    thread = threading.Thread(target=leave)
    thread.start()
    yield thread
    thread.join(10)
    assert not thread.is_alive()


def test_a_process_ends_without_its_watcher(capfd, beside):
    (hub, watcher), ends = beside, []
    waiting = threading.Thread(target=lambda: ends.append(watcher.is_to_end()))
    waiting.start()
    assert hub.read(10) == {"here": True}
    watcher._watcher.kill()
    waiting.join(10)
    assert ends == [True]
    assert "the process that watches this one has ended" in capfd.readouterr().err
    assert hub.read(10) is None  # And so the others hear of it.
    watcher._all_left.set()
    watcher._line.close()
    watcher._watcher.wait(10)


def test_a_watcher_that_cannot_start_is_named_to_all(monkeypatch):
    server = listening(0)
    port = server.getsockname()[1]
    place = store.Place(1, 2, "127.0.0.1:1")
    monkeypatch.setattr(store, "place", lambda: place)
    told = [{"host": "a", "port": port}, {"host": "b"}]
    monkeypatch.setattr(store, "of_all", lambda *_: told)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    heard = []

    def hub():
        with server:
            line = Line(server.accept()[0], 1)
        line.say(here=True)
        heard.extend(line.heard(10))
        line.close()

    listens = threading.Thread(target=hub)
    listens.start()
    with pytest.raises(JobError, match=r"process 1 on host b .*bin/false.* status 1.*sys"):
        watch_job().__enter__()
    listens.join(10)
    kind, text = heard[-1]["kind"], heard[-1]["happened"]
    assert kind == EventKind.FAILED
    assert text.startswith("cannot start its watcher")


def test_a_watcher_needs_nothing_but_python():
    show = "print(*{name.partition('.')[0] for name in sys.modules})"
    show += "; print(open('/proc/self/status').read())" if sys.platform == "linux" else ""
    job = pathlib.Path(sidecar.__file__).parent
    program = client._START.replace("sidecar.main()", show)
    command = [sys.executable, "-I", "-S", "-c", program]
    command += map(str, (job.parent.parent, job.parent, job))
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names, _, status = told.partition("\n")
    others = set(names.split()) - set(sys.stdlib_module_names)
    assert others == {"sparsejax", "__main__"}
    for kib in re.findall(r"VmHWM:\s+(\d+) kB", status):
        assert int(kib) < 20_000  # mostly Python itself


def test_what_is_sent_to_all_of_a_job_does_not_end_a_watcher(beside):
    hub, watcher = beside
    threading.Thread(target=watcher.is_to_end, daemon=True).start()
    assert hub.read(10) == {"here": True}
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        watcher._watcher.send_signal(each)
    assert hub.read(10) == {"here": True}
    with leaving(watcher.leave):
        assert hub.read(10) == {"left": True}
        hub.say(bye=True)


def test_a_forked_child_says_nothing_for_its_process(monkeypatch, beside):
    watch = watch_job()
    hub, watch._watcher = beside
    threading.Thread(target=watch._wait, daemon=True).start()
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        watch.__exit__(SystemExit, SystemExit(0), None)
        watch._fail("ended its script inside its block")
    assert [hub.read(10) for _ in range(3)] == 3 * [{"here": True}]
    with leaving(lambda: watch.__exit__(None, None, None)):
        assert {"left": True} in hub.heard(10)
        hub.say(bye=True)


class Unread(io.StringIO):
    """What nobody reads any more: its pipe is broken, or full."""

    def __init__(self, full):
        super().__init__()
        self.full, self.read_on = full, threading.Event()

    def write(self, text):
        if not self.full:
            raise BrokenPipeError
        return self.read_on.wait(10)


@pytest.mark.parametrize("full", [False, True])
def test_a_process_is_told_where_nobody_reads_what_is_printed(monkeypatch, full):
    ours, other = socket.socketpair()
    own, process = socket.socketpair()
    watched = ending.Process(os.getpid(), Line(own, 1))
    lines = [(0, other.detach())]
    about = {"hosts": ["a", "b"], "process": 1, "timeout": 5.0, "lines": lines}
    watcher = sidecar.Sidecar(watched, about).watcher
    unread = Unread(full)
    with monkeypatch.context() as nobody:
        nobody.setattr(sidecar, "_TO_READ", 0.2)
        nobody.setattr(watched, "end", lambda patience: None)
        nobody.setattr(sys, "stderr", unread)
        watcher.start()
        Line(ours, 1).say(why="process 0 failed")
        assert Line(process, 1).read(5) == {"why": "process 0 failed"}
        unread.read_on.set()
        watcher.wait_for_ends(10)
    for each in (ours, own, process):
        each.close()


def test_process_0_waits_for_those_that_leave_later(capfd):
    pairs = {process: socket.socketpair() for process in (1, 2)}
    given = [Line(pair[1], process) for process, pair in pairs.items()]
    others = [Line(pair[0], 0) for pair in pairs.values()]
    watcher = client.WatcherProcess(given, 0, {0: "a", 1: "b", 2: "c"}, 2.0)
    threading.Thread(target=watcher.is_to_end, daemon=True).start()
    others[0].say(left=True)
    with leaving(watcher.leave) as left:
        for _ in range(3):
            for line in others:
                assert line.read(10) == {"here": True}
                line.say(here=True)
        assert left.is_alive()
        others[1].say(left=True)
    # Until the others have read that all have left.
    with pytest.raises(subprocess.TimeoutExpired):
        watcher._watcher.wait(0.5)
    for line in others:
        assert {"bye": True} in line.heard(10)
        line.close()
    assert watcher._watcher.wait(10) == 0
    assert not capfd.readouterr().err
