"""What processes that read each for itself tell each other, each a thread here."""

import functools
import re
import socket

import jax
import numpy as np
import pytest

import sparsejax
from sparsejax.checkpoints import description, saving, together
from sparsejax.checkpoints.together import on_all
from sparsejax.errors import ArgumentError, CheckpointError, JobError, message
from tests.helpers import jobs


HOST = socket.gethostname()


def outcomes(monkeypatch, *parts):
    """What each process returns or raises, of whose part comes this."""

    def read(part):
        if isinstance(part, Exception):
            raise part
        return part

    calls = [lambda part=part: on_all("it", lambda: read(part)) for part in parts]
    return [(type(x), message(x)) for x in jobs.run(monkeypatch, calls)]


def test_all_have_their_parts(monkeypatch):
    assert outcomes(monkeypatch, 3, 4) == [(int, "3"), (int, "4")]
    assert outcomes(monkeypatch, None, None) == [(type(None), "None")] * 2


@pytest.mark.parametrize("at", [0, 2])
def test_what_one_cannot_read_all_refuse_with_one_sentence(monkeypatch, at):
    parts: list = [3, 4, 5]
    parts[at] = CheckpointError("it is damaged.")
    said = f"process {at} on host {HOST}: it is damaged."
    assert outcomes(monkeypatch, *parts) == [(CheckpointError, said)] * 3


def test_of_several_the_first_is_told_and_what_is_so_for_all_as_it_is(monkeypatch):
    first, second = CheckpointError("it is damaged."), CheckpointError("it is gone.")
    said = f"process 1 on host {HOST}: it is damaged."
    assert outcomes(monkeypatch, 3, first, second) == [(CheckpointError, said)] * 3
    assert outcomes(monkeypatch, first, first) == [(CheckpointError, "it is damaged.")] * 2


def test_another_error_is_raised_where_it_is_and_told_elsewhere(monkeypatch):
    wrong = ArgumentError("like must have its arrays.")
    there, here = outcomes(monkeypatch, 3, wrong)
    assert here == (ArgumentError, "like must have its arrays.")
    assert there == (
        CheckpointError,
        f"process 1 on host {HOST}: like must have its arrays.",
    )
    silent, _ = outcomes(monkeypatch, 3, RuntimeError())
    assert silent == (CheckpointError, f"process 1 on host {HOST}: RuntimeError")


def test_who_waited_for_another_in_vain_is_not_the_cause(monkeypatch):
    late, full = jax.errors.JaxRuntimeError("DEADLINE"), OSError("no room")
    waited, failed = outcomes(monkeypatch, late, full)
    assert failed == (OSError, "no room")
    assert waited == (CheckpointError, f"process 1 on host {HOST}: no room")
    assert outcomes(monkeypatch, 3, late)[1] == (type(late), "DEADLINE")


def saves(tmp_path, *given):
    """Functions, one a process, that each save to a path, about something."""
    save = lambda name, about: sparsejax.save(tmp_path / name, {"a": 1}, about=about)
    return [functools.partial(save, *one) for one in given]


@pytest.mark.parametrize("call", ["save", "restore"])
def test_who_waits_for_others_to_call_it_says_so(call, monkeypatch, tmp_path, capsys):
    """One may have more to do before, and is waited for; or it never comes."""
    pytest.importorskip("orbax.checkpoint")
    monkeypatch.setattr(together, "_TO_DO", 0.5)
    monkeypatch.setattr(together, "_PATIENCE", 0.1)
    run = functools.partial(getattr(sparsejax, call), tmp_path / "1", {"a": 1})
    error, _ = jobs.run(monkeypatch, [run, lambda: None])
    fix = (
        "all processes call it, with one path. If it is called under "
        "`if jax.process_index() == 0`, call it on all."
    )
    assert isinstance(error, JobError)
    assert message(error) == (
        f"process 1 of 2 did not call sparsejax.{call} within 0.5 s (process 0 on {HOST} "
        f"did): {fix}"
    )
    waits = f"sparsejax: process 0 waits in sparsejax.{call} for other processes to call it"
    assert capsys.readouterr().err == f"{waits}: {fix}\n"
    assert not any(tmp_path.iterdir())


def test_all_save_to_one_path_about_the_same(monkeypatch, tmp_path):
    pytest.importorskip("orbax.checkpoint")
    functions = saves(tmp_path, ("1", None), ("1", None), ("2", None))
    for error in jobs.run(monkeypatch, functions):
        assert isinstance(error, CheckpointError)
        text = (
            f"the path differs between processes: on host {HOST} (process 0) it is "
            f"{tmp_path}/1, and on host {HOST} (process 2) {tmp_path}/2. All processes "
        )
        assert message(error).startswith(text)
    functions = saves(tmp_path, ("1", {"seed": 0}), ("1", {"seed": 1}))
    for error in jobs.run(monkeypatch, functions):
        assert "about= differs between processes: on host" in str(error)
    assert not any(tmp_path.iterdir())


def test_what_one_process_refuses_to_save_all_refuse(monkeypatch, tmp_path):
    monkeypatch.setattr(together, "_TO_DO", 10)
    functions = saves(tmp_path, ("1", None), ("1", {"seed": [0]}))
    wrong = "about must have texts as keys"
    there, here = jobs.run(monkeypatch, functions)
    assert isinstance(here, ArgumentError)
    assert message(here).startswith(wrong)
    assert isinstance(there, CheckpointError)
    assert message(there).startswith(f"process 1 on host {HOST}: {wrong}")


def test_what_process_0_writes_for_all_is_equal_on_all(monkeypatch):
    """A key, or the position of a loader, of one process would be that of all."""
    state = {"a": np.arange(3), "n": np.float32(0.5), "e": np.zeros((0, 2))}
    # In a job of one process an array of JAX's is over devices of all.
    part, stored = description.described(state | {"w": jax.numpy.ones((2, 3))})
    texts = saving._texts(part, list(map(saving._stored, stored)))
    long = description.Value("x" * 1000)
    assert len(saving._texts(long, [])[""]) < 200
    twice, arrays = description.described({"a": {"b": 1}, "a/b": 2})
    assert saving._texts(twice, arrays) == {"a/b": "1", "a/b #1": "2"}
    assert texts.keys() == {"a", "n", "e", "w"}
    assert (texts["n"], texts["w"]) == ("0.5", "float32[2, 3]")
    assert re.fullmatch(r"int64\[3\] of hash [0-9a-f]{16}", texts["a"])
    for other in ({**texts, "a": "int64[3] of hash 0"}, {"n": "0.5"}):
        same = [together.Same("the leaf", own, "", "Keep it.") for own in (texts, other)]
        calls = [lambda one=one: together.check_equal(one) for one in same]
        for error in jobs.run(monkeypatch, calls):
            there = re.escape(texts["a"])
            it = rf"the leaf 'a' differs .*{there}, and on .*(hash 0|missing)"
            assert re.match(it, message(error))
    calls = [lambda: together.check_equal(same[0])] * 2
    assert jobs.run(monkeypatch, calls) == [None, None]
