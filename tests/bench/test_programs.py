"""Programs stay as large as they are, or grow with the logarithm, as ranks grow."""

import json

import pytest

from benchmarks.harness import record
from benchmarks.network.scale import programs
from tests import helpers


# Operations of StableHLO that a doubling of the ranks may add, as a share of those on 16.
# Where a hop is a turn of a loop, or there are none, hardly any; else that of a hop, which
# is a large part of what consists of them, and a small one of what has other stages, too.
FLAT, A_HOP_AMONG_OTHERS, A_HOP = 0.02, 0.05, 0.2
PARTLY_BY_HOPS = ("zen, bytes",)
BY_HOPS = ("spardl, 4 teams",)
# What sends to one rank after another by permutations, each an operation of its own.
LINEAR = ("ok-topk, rotated",)
QUICK = [("zen", "cpu")]
# Messages for GPUs are the larger programs. One of each kind of stages: others consist of
# parts of these, as "sparcml" and "hierarchical" of the hops of "zen, bytes", "gtopk" of
# those between teams, and "sparseps" of a push and a gather.
FOR_GPUS = ("zen", "zen, bytes", "agsparse, bruck", "spardl, 4 teams", "omnireduce")
FOR_GPUS += ("ok-topk",)
REST = [*((name, "cuda") for name in FOR_GPUS), ("powersgd", "cpu")]


@pytest.mark.parametrize(("name", "platform"), [*QUICK, *helpers.slow(*REST)])
def test_programs_grow_with_the_logarithm_of_the_ranks(name, platform):
    scheme = programs.SCHEMES[name]
    few, many = (
        programs.size_of(scheme, ranks, platform).operations for ranks in (16, 1024)
    )
    share = FLAT
    if name in BY_HOPS or name in PARTLY_BY_HOPS:
        share = A_HOP if name in BY_HOPS else A_HOP_AMONG_OTHERS
    assert many <= few * (1 + 6 * share) + 240, (name, few, many)


@pytest.mark.slow
@pytest.mark.parametrize("name", LINEAR)
def test_what_grows_with_the_ranks_is_said_to(name):
    """So that who mends it finds it here."""
    scheme = programs.SCHEMES[name]
    few, many = (programs.size_of(scheme, n, "cpu").operations for n in (16, 64))
    assert many >= few + 240


def test_operations_in_inner_functions_and_branches_are_counted():
    sizes = [
        programs.size_of(programs.SCHEMES[name], 4, "cpu", (4096,))
        for name in ("all-reduce", "agsparse")
    ]
    assert sizes[0].operations < 60 < 5 * sizes[0].operations < sizes[1].operations
    assert sizes[1].equations > 300
    rows = [{"ranks": n, "operations": 100 + 2 * n} for n in (4, 16, 64)]
    assert programs.growth(rows) == 2.0


@pytest.mark.slow
def test_what_is_compiled_has_a_record_of_its_own(monkeypatch, tmp_path, capsys):
    """For ranks that are named for it alone, and where nothing is counted."""
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(programs, "NUMBERS", 4096)
    line = ["--ranks", "--compile", "2", "4", "--schemes", "all-reduce", "agsparse"]
    given = programs.Settings.parse(line)
    assert given.ranks == ()
    programs.compile_all(given)
    (written,) = tmp_path.iterdir()
    head, *rows = map(json.loads, written.read_text().splitlines())
    assert head["command"].endswith("--ranks --schemes all-reduce agsparse --compile 2 4")
    at = {(row["scheme"], row["ranks"]): row for row in rows}
    assert len(at) == len(rows) == 4
    assert all(row["seconds"] > 0 and row["processor"] > 0 for row in rows)
    for n in (2, 4):
        few, many = (at[name, n]["instructions"] for name in ("all-reduce", "agsparse"))
        assert 2 < few < many
    assert "compiled for CPUs" in capsys.readouterr().out
