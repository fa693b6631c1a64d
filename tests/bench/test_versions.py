"""Two versions of the library, compared by one benchmark."""

import json

from benchmarks.harness import versions
from benchmarks.harness.record import path_of


def row(scheme, **fields):
    return {"workload": "lstm", "hosts": 4, "scheme": scheme, **fields}


def test_each_version_runs_twice_and_what_drifts_weighs_on_both(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "here").mkdir()
    ran, calls = [], []

    def status(full, folder):
        ran.append((len(ran), folder))
        calls.append(full)
        lines = [{"date": "today"}, row("zen", seconds=[len(ran)])]
        name = full[full.index("--name") + 1]
        path_of(name, ".jsonl").write_text("\n".join(map(json.dumps, lines)))
        return 0

    monkeypatch.setattr(versions, "_git", lambda *arguments: None)
    monkeypatch.setattr(versions, "_status", status)
    monkeypatch.setattr(versions, "ROOT", tmp_path / "here")
    recorder = versions.Recorder
    monkeypatch.setattr(
        versions, "Recorder", lambda *given: recorder(*given, folder=tmp_path)
    )
    assert versions.main(["HEAD~1", "benchmarks.some", "--hosts", "4"]) == 0
    there = [turn for turn, folder in ran if folder != tmp_path / "here"]
    assert there == [0, 3]
    assert all(call[2:6] == ["benchmarks.some", "--hosts", "4", "--name"] for call in calls)
    # Medians of the first and the fourth run, and of the second and the third.
    printed = capsys.readouterr().out
    assert " ".join(printed.splitlines()[-3].split()) == "lstm 4 zen 2.5 2.5 1.00"
