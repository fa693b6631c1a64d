"""Runs a benchmark with two versions of the library in turn, and compares them.

    python -m benchmarks.harness.versions COMMIT benchmarks.network.communication \\
        --hosts 4 16 --workloads lstm topk --more-rates --schemes psum zen

Shows whether something got slower since a commit. The files of the commit, benchmarks
included, are checked out into a temporary folder, and the command runs there, here, here,
and there again, so that a drift of the machine affects both versions. All arguments after
the module's name are those of the benchmark, which must accept `--name`.

For each row that both versions have, the median of all samples is printed, before and
after, with the ratio. If the rows have a side `psum`, which does not depend on the library,
its ratio shows how comparable the runs are.
"""

import dataclasses
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from benchmarks.harness import table
from benchmarks.harness.record import Recorder, path_of, say
from benchmarks.harness.table import Column


ROOT = pathlib.Path(__file__).parent.parent.parent
# The fields that identify a row, and the fields that are compared; rows may lack some.
KEYS = ("workload", "rate", "hosts", "scheme")
FIELDS = ("seconds", "cpu", "compile", "sent")


@dataclasses.dataclass(frozen=True)
class Version:
    """A version of the library: its name in the results, and the folder of its files."""

    name: str
    folder: pathlib.Path

    def rows(self, command: Sequence[str], results: pathlib.Path) -> list[dict]:
        """Runs a benchmark with this version, and returns the rows that it writes."""
        full = [sys.executable, "-m", *command, "--name", str(results / self.name)]
        if _status(full, self.folder):
            raise SystemExit(f"{self.name}: {' '.join(command)} failed, see above.")
        written = path_of(self.name, ".jsonl", results)
        lines = written.read_text().splitlines()
        written.unlink()
        return [json.loads(line) for line in lines[1:]]


def main(argv: list[str] | None = None) -> int:
    commit, *command = argv or sys.argv[1:]
    line = f"python -m benchmarks.harness.versions {commit} {' '.join(command)}"
    record = Recorder("versions", line, ("benchmark", *KEYS))
    samples: dict[str, list[dict]] = {"before": [], "after": []}
    with tempfile.TemporaryDirectory() as scratch:
        before = pathlib.Path(scratch) / "checkout"
        _git("worktree", "add", "--detach", str(before), commit)
        try:
            versions = Version("before", before), Version("after", ROOT)
            for version in (*versions, *reversed(versions)):
                say(f"\n{version.name}:")
                samples[version.name] += version.rows(command, pathlib.Path(scratch))
        finally:
            _git("worktree", "remove", "--force", str(before))
    about = {"benchmark": command[0], "commit": commit}
    record.rows = [about | row for row in compared(samples["before"], samples["after"])]
    show(record.rows)
    say(f"\nwritten: {record.write()}")
    return 0


def compared(before: list[dict], after: list[dict]) -> list[dict]:
    """Returns for each row that both versions have the medians of fields in each."""
    rows = []
    names = list(dict.fromkeys(map(_name, after)))
    for name in names:
        both = [[row for row in rows if _name(row) == name] for rows in (before, after)]
        if not all(both):
            continue
        row = {key: both[1][0][key] for key in KEYS if key in both[1][0]}
        for field in FIELDS:
            values = [[x for row in side for x in _samples(row, field)] for side in both]
            if all(values):
                row[field] = [statistics.median(x) for x in values]
        rows.append(row)
    return rows


def show(rows: list[dict]) -> None:
    """Prints the comparison: each field before and after, and the ratio."""
    fields = [field for field in FIELDS if any(field in row for row in rows)]
    columns = [Column(key, key) for key in KEYS if any(key in row for row in rows)]
    for field in fields:
        at = lambda row, i, field=field: row[field][i] if field in row else None
        ratio = lambda row, at=at: at(row, 1) / at(row, 0) if at(row, 0) else None
        columns += [
            Column(field, lambda row, at=at: at(row, 0), ".4g"),
            Column("now", lambda row, at=at: at(row, 1), ".4g"),
            Column("ratio", ratio, ".2f"),
        ]
    say()
    table.show(rows, columns)


def _name(row):
    return json.dumps([row.get(key) for key in KEYS])


def _samples(row, field):
    value = row.get(field)
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _status(command, folder):
    return subprocess.run(command, cwd=folder, check=False).returncode


def _git(*arguments):
    subprocess.run(["git", "-C", str(ROOT), *arguments], check=True, capture_output=True)


if __name__ == "__main__":
    sys.exit(main())
