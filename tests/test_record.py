"""What a benchmark leaves behind, and what it keeps of what was there."""

import json

import pytest

from benchmarks import record


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    return tmp_path


def written(command, rows, keep=None):
    one = record.Recorder(command)
    for row in rows:
        one.add(**row)
    if keep:
        one.keep("test", keep)
    head, *found = map(json.loads, one.write("test").read_text().splitlines())
    return head, found


def test_rows_of_an_earlier_run_are_kept_with_who_measured_them(results):
    written("first", [{"hosts": 2, "ms": 1}, {"hosts": 4, "ms": 2}])
    head, rows = written("second", [{"hosts": 4, "ms": 3}], lambda row: row["hosts"] == 2)
    assert rows == [{"hosts": 2, "ms": 1}, {"hosts": 4, "ms": 3}]
    assert head["command"] == "second"
    (kept,) = head["kept"]
    assert (kept["command"], kept["rows"]) == ("first", 1)
    head, rows = written("third", [{"hosts": 8, "ms": 4}], lambda row: row["hosts"] != 8)
    assert [row["ms"] for row in rows] == [1, 3, 4]
    assert [one["command"] for one in head["kept"]] == ["first", "second"]


def test_where_nothing_was_measured_before_there_is_nothing_to_keep(results):
    head, rows = written("first", [{"ms": 1}], lambda row: True)
    assert rows == [{"ms": 1}]
    assert "kept" not in head
