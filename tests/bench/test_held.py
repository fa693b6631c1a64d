"""What a count assumes is held against a run: what differs is an error, and not written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from benchmarks.device import compiled, held, hlo, turns
from benchmarks.device.walk import Counts
from sparsejax.wire.ladder import Ladder, Rung


def stage(count):
    """Messages of 16 or 64 entries, 8 a tile; the fullest part has so many."""
    steps = Ladder(4096, 256, 8, (Rung(16, None, 0, 1100), Rung(64, None, 0, 4200)))
    counts = np.full((16, 4), 1)
    counts[2, 1] = count
    return turns.Stage(steps, 3, counts, np.full((16, 4), 9), 1e6)


def test_a_loop_that_turns_otherwise_than_reckoned_is_an_error(monkeypatch):
    known = turns.Turns({"push": stage(10)})
    place = ("push_pull.py:Stages.by_entries", "messages.py:transmit")
    assert held.compare("zen", known, {place: [1] * 16}, set()) == {"push transmit": 16}
    with pytest.raises(hlo.ProgramError, match=r"took 32 turns .* where 16 were reckoned"):
        held.compare("zen", known, {place: [2] * 16}, set())
    with pytest.raises(hlo.ProgramError, match="nothing is known of a loop"):
        held.compare("zen", known, {("other.py:search",): [1] * 16}, set())


def test_a_loop_that_runs_on_gpus_alone_is_an_error():
    known = turns.Turns({"push": stage(10)})
    place = ("push_pull.py:Stages.by_entries", "messages.py:transmit")
    known.turns((*place, "tiles.py:pack", "tiles.py:_each"))
    with pytest.raises(hlo.ProgramError, match=r"CPU devices do not run.*pack"):
        held.compare("zen", known, {place: [1] * 16}, known.asked)


def test_rounds_and_bytes_that_differ_from_the_program_for_a_gpu_are_an_error():
    known = turns.Turns({"push": stage(64 + 5)})
    agreed = {"rounds": 2, "sent": 9_999.0}
    held.agree("zen", 4096, known, agreed, 10_000.0)
    with pytest.raises(hlo.ProgramError, match=r"took 3 rounds .* where 2 were reckoned"):
        held.agree("zen", 4096, known, agreed | {"rounds": 3}, 10_000.0)
    with pytest.raises(hlo.ProgramError, match=r"sent 9,999 bytes .* sends 10,100"):
        held.agree("zen", 4096, known, agreed, 10_100.0)


def test_a_count_that_does_not_hold_ends_the_run_and_is_not_written(monkeypatch, tmp_path):
    from benchmarks.device import __main__ as program

    one = compiled.Counted(Counts(launches=3, sent=8.0), 0, 0.1, turns.Turns({}), None)
    monkeypatch.setattr(program.index_sets, "mesh", lambda ranks: None)
    monkeypatch.setattr(program.h200, "mesh", lambda ranks: None)
    monkeypatch.setattr(program.compiled, "counted", lambda *_, **how: one)
    monkeypatch.setattr("benchmarks.harness.record.RESULTS", tmp_path)
    load = ["--loads", "65,536 x 64", "--schemes", "zen"]
    monkeypatch.setattr("sys.argv", ["device", *load])

    def differs(*_):
        raise hlo.ProgramError("zen took 3 rounds where 2 were reckoned.")

    monkeypatch.setattr(program.held, "hold", differs)
    assert program.main() == 1
    assert not list(tmp_path.iterdir())
    seen = {"turns": {}, "rounds": 2, "sent": 8.0}
    monkeypatch.setattr(program.held, "hold", lambda *_: seen)
    assert program.main() == 0
    (written,) = tmp_path.iterdir()
    assert '"rounds": 2' in written.read_text()


def test_loops_count_their_turns_while_they_run():
    def halve(x):
        return lax.while_loop(lambda x: x > 1, lambda x: x / 2, x)

    with held.counting() as found:
        result = jax.jit(halve)(jnp.float32(20))
        jax.effects_barrier()
    assert float(result) == 0.625
    ((place, numbers),) = found.items()
    assert place[-1].startswith("test_held.py:test_loops_count")
    assert place[-1].endswith("halve")
    assert numbers == [5]
