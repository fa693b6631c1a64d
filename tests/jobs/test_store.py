"""What processes of a job say to one another, and what becomes of what differs."""

import functools
import math
import time

from sparsejax.errors import JobError
from sparsejax.jobs import agreement, store
from tests.helpers import jobs


REMEDIES = {"model": agreement.Remedy("Give all the same model.")}


def said(*topics, processes=None, timeout=20.0, why=()):
    """Functions, one a process, that each say its topics."""
    everyone = range(len(topics)) if processes is None else processes
    why = dict(why)
    return [
        functools.partial(
            agreement.disagreements,
            *("init", own, REMEDIES, everyone, timeout, why.get(process, "")),
        )
        for process, own in enumerate(topics)
    ]


def model(**values):
    return {"model": values, "mesh": {"the mesh": "data = 2"}}


def test_processes_that_say_the_same_find_nothing(monkeypatch):
    assert jobs.run(monkeypatch, said(*[model(w="float32[3]")] * 3)) == [[]] * 3


def test_what_differs_is_named_with_both_sides_on_all(monkeypatch):
    topics = [model(w="a", b="x"), model(w="a", b="y"), model(w="a", b="x", v="z")]
    first, *others = jobs.run(monkeypatch, said(*topics))
    assert others == [first, first]
    hosts = [text.split(" (")[0] for text in first[0].split(" on host ")[1:]]
    assert len(hosts) == 2
    host = f"host {hosts[0]}"
    assert first == [
        f"b is x on {host} (process 0), {host} (process 2), and y on {host} (process 1). "
        "Give all the same model.",
        f"v is absent on {host} (process 0), {host} (process 1), and z on {host} "
        "(process 2). Give all the same model.",
    ]


def test_only_the_first_of_many_differences_are_told(monkeypatch):
    names = [f"w{i}" for i in range(9)]
    one, other = ({name: text for name in names} for text in ("a", "b"))
    found, _ = jobs.run(monkeypatch, said({"model": one}, {"model": other}))
    assert [text.split()[0] for text in found] == [*names[:5], "and"]
    assert found[-1] == "and 4 more of the model."


def test_a_long_value_is_shown_where_it_begins_to_differ(monkeypatch):
    one, other = (model(w=f"{'a' * 500}{letter}{'c' * 500}") for letter in "bd")
    (text,), _ = jobs.run(monkeypatch, said(one, other))
    assert len(text) < 600
    assert f"... {'a' * 80}b{'c' * 79} ... on host" in text
    assert f"... {'a' * 80}d{'c' * 79} ... on host" in text


def test_a_process_that_cannot_say_it_is_told_of_and_not_waited_for(monkeypatch):
    told = jobs.run(monkeypatch, said(model(), {}, why={1: "RuleError: no leaf."}))
    for (text,) in told:
        assert "(process 1) cannot go on: RuleError: no leaf." in text


def test_some_of_the_processes_may_agree_by_themselves(monkeypatch):
    functions = said(model(w="a"), {}, model(w="b"), processes=(0, 2))
    all_say = lambda: store.of_all("where it is", store.place().process, 20.0)
    functions[1] = all_say
    functions[0::2] = [lambda own=own: (own(), all_say()) for own in functions[0::2]]
    (first, everyone), alone, (last, _) = jobs.run(monkeypatch, functions)
    assert first == last
    assert "(process 0), and b on host" in first[0]
    assert first[0].count("(process") == 2
    assert everyone == alone == [0, 1, 2]


def test_who_does_not_come_is_named_in_time(monkeypatch):
    functions = said(model(), model(), model(), timeout=0.3)
    told = jobs.run(monkeypatch, [*functions[:2], lambda: None])
    assert told[2] is None
    for error in told[:2]:
        assert isinstance(error, JobError)
        text = str(error)
        assert text.startswith("process 2 of 3 did not reach init within 0.3 s")
        assert "process 0 on" in text
        assert "process 1 on" in text


def test_who_comes_too_late_is_told_so(monkeypatch):
    first, _ = said(model(), model(), timeout=0.2)
    _, last = said(model(), model())

    def late():
        time.sleep(0.6)
        return last()

    one, other = jobs.run(monkeypatch, [first, late])
    assert "process 1 of 2 did not reach init within 0.2 s" in str(one)
    assert "all 2 processes said what it gives init, but one of them later than" in str(
        other
    )


def test_a_timeout_may_be_without_end(monkeypatch):
    assert jobs.run(monkeypatch, said(model(), model(), timeout=math.inf)) == [[], []]


def test_processes_at_other_places_are_told(monkeypatch):
    one, _ = said(model(), model())
    other = lambda: store.of_all("its plan", 1, 20.0)
    for error in jobs.run(monkeypatch, [one, other]):
        assert isinstance(error, JobError)
        match = "process 0 said what it gives init where process 1 said its plan"
        assert match in str(error)
