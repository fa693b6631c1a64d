"""What processes compare once: when it is new to them, and never again."""

import functools
import re
import time

import pytest

from sparsejax.errors import ArgumentError, JobError, message
from sparsejax.jobs import agreed, store
from sparsejax.jobs.agreed import Agreed
from tests.helpers import jobs


FIX = "Give all the same shapes."


def process(*shapes, timeout=20.0, asking=(0, 1)):
    """A function that compares the shapes of one process, and returns what it raises."""

    def run():
        each, raised = Agreed("shapes", FIX), []
        for shape in shapes:
            try:
                each.check("step", shape, lambda x=shape: {"x": x}, asking, timeout)
            except (ArgumentError, JobError) as error:
                raised.append(error)
        return raised

    return run


@pytest.fixture
def puts(monkeypatch):
    """The keys that processes have put into the store."""
    seen, put = [], jobs.Service.key_value_set
    noting = lambda self, key, text: seen.append(key) or put(self, key, text)
    monkeypatch.setattr(jobs.Service, "key_value_set", noting)
    return seen


def test_what_is_equal_is_compared_once(monkeypatch, puts):
    run = functools.partial(jobs.run, monkeypatch)
    assert run([process("[4]"), process("[4]")]) == [[], []]
    once = len(puts)
    assert run([process(*["[4]"] * 5), process(*["[4]"] * 5)]) == [[], []]
    assert len(puts) == 2 * once
    twice = process("[4]", "[2]", "[4]", "[2]")
    assert run([twice, twice]) == [[], []]
    assert len(puts) == 4 * once


def test_what_differs_is_named_on_all(monkeypatch):
    first, second = jobs.run(monkeypatch, [process("[4]", "[9]"), process("[3]", "[9]")])
    assert [*map(str, first)] == [*map(str, second)]
    (error,) = first  # and they go on
    assert isinstance(error, ArgumentError)
    on = r"on host \S+ \(process {}\)"
    lines = rf"step: shapes differ between processes:\n\* x is \[4\] {on.format(0)}, and "
    assert re.fullmatch(rf"{lines}\[3\] {on.format(1)}\.\n{FIX}", message(error))


def test_what_is_new_in_different_calls_differs_in_both(monkeypatch):
    """Each would compare its own with that of another step."""
    first, second = process("[8]", "[8]", "[4]"), process("[8]", "[4]", "[8]")
    for (error,) in jobs.run(monkeypatch, [first, second]):
        assert isinstance(error, ArgumentError)
        assert "* the number of the call is 3 on host" in str(error)
        assert "x is" not in str(error)


def test_what_is_new_to_one_alone_is_printed_and_then_named(monkeypatch, capsys):
    """The other waits in a collective, and nothing tells it of this one."""
    monkeypatch.setattr(agreed, "_PATIENCE", 0.1)
    functions = [process("[4]", "[4]", timeout=0.5), process("[4]", "[3]", timeout=0.5)]
    none, (error,) = jobs.run(monkeypatch, functions)
    assert none == []
    assert isinstance(error, JobError)
    new = "process 1 gives step new shapes, x: [3], and "
    assert message(error).startswith(
        f"{new}not all others did: process 0 of 2 did not give step new shapes within 0.5 s"
    )
    assert message(error).endswith(FIX)
    printed = f"sparsejax: {new}waits for other processes to do so.\n"
    assert capsys.readouterr().err == printed


def test_hosts_may_read_their_data_before_the_first(monkeypatch, capsys):
    monkeypatch.setattr(agreed, "_PATIENCE", 0.1)
    late = process("[4]")
    functions = [process("[4]"), lambda: (time.sleep(0.4), late())[1]]
    assert jobs.run(monkeypatch, functions) == [[], []]
    assert capsys.readouterr().err == ""
    (error,) = jobs.run(monkeypatch, [process("[4]", timeout=0.2), lambda: None])[0]
    assert message(error).startswith("process 1 of 2 did not reach step within 0.2 s")


def test_others_and_one_alone_are_not_asked(monkeypatch, puts):
    functions = [process("[4]"), process("[4]"), process("[3]")]
    assert jobs.run(monkeypatch, functions) == [[]] * 3
    functions = [process("[4]", asking=(0,)), process("[3]", asking=(1,))]
    before = len(puts)
    assert jobs.run(monkeypatch, functions) == [[], []]
    assert len(puts) == before
    monkeypatch.undo()
    assert store.place().processes == 1
    assert process("[4]")() == []
