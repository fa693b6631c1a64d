"""Settings and result files of the benchmarks."""

import dataclasses
import json

import pytest

from benchmarks.harness import record, settings
from benchmarks.harness.settings import option


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """Measures nothing."""

    PROGRAM = "benchmarks.nothing"
    parts: tuple[str, ...] = option((), positional=True, choices=("one", "two"))
    hosts: tuple[int, ...] = option((2, 4), "numbers of hosts")
    more_rates: tuple[str, ...] = option(("1gbit",))
    share: float = option(0.5, "a share, in %")
    plot: bool = option(False)
    peers: str | None = option(None, recorded="PYTHON")

    def __post_init__(self):
        super().__post_init__()
        if self.share > 1:
            raise ValueError("share must be at most 1")


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    return tmp_path


def written(command, rows, keys=()):
    recorder = record.Recorder("test", command, keys)
    for row in rows:
        recorder.add(**row)
        path = recorder.write()
    head, *lines = map(json.loads, path.read_text().splitlines())
    return head, lines


def test_rows_of_an_earlier_run_are_kept_with_who_measured_them(results):
    written("first", [{"hosts": 2, "ms": 1}, {"hosts": 4, "ms": 2}], ["hosts"])
    head, rows = written("second", [{"hosts": 4, "ms": 3}], ["hosts"])
    assert rows == [{"hosts": 2, "ms": 1}, {"hosts": 4, "ms": 3}]
    assert head["command"] == "second"
    (kept,) = head["kept"]
    assert (kept["command"], kept["rows"]) == ("first", 1)
    head, rows = written("third", [{"hosts": 8, "ms": 4}], ["hosts"])
    assert [row["ms"] for row in rows] == [1, 3, 4]
    assert [run["command"] for run in head["kept"]] == ["first", "second"]


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["--hosts", "2", "4", "--share", "0.5"], "python -m benchmarks.nothing"),
        (
            ["one", "--hosts", "16", "--more-rates", "--plot"],
            "python -m benchmarks.nothing one --hosts 16 --more-rates --plot",
        ),
        (
            ["--share", "0.25", "--peers", "/some/python"],
            "python -m benchmarks.nothing --share 0.25 --peers PYTHON",
        ),
    ],
)
def test_settings_come_from_arguments_and_say_their_command(argv, command, monkeypatch):
    given = Settings.parse(argv)
    assert given.command() == command
    for name, value in given.environment().items():
        monkeypatch.setenv(name, value)
    assert Settings.from_environment() == given


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["three"], "unknown parts 'three'; there are one, two"),
        (["--share", "2"], "share must be at most 1"),
    ],
)
def test_wrong_arguments_are_named(argv, message, capsys):
    with pytest.raises(SystemExit):
        Settings.parse(argv)
    assert message in capsys.readouterr().err
