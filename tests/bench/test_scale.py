"""What is reckoned for many hosts: rounds are those of a run, and a model finds itself."""

import jax
import numpy as np
import pytest

from benchmarks.data import workloads
from benchmarks.network.scale import __main__ as scale, gpus, model, rounds
from benchmarks.network.scale.model import Collective, Here
from benchmarks.network.scale.rounds import Round
from benchmarks.network.schemes import SCHEMES
from tests import helpers


UNITS, WIDTH = 4096, 16


# One of each kind of rounds: all to all, all from all, hops, blocks, and equal ranges.
KINDS = "zen", "agsparse", "hierarchical", "omnireduce", "sparseps"


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_rounds_are_those_of_a_run(name):
    n = 16
    scheme = SCHEMES[name]

    def run(x):
        return helpers.call(scheme, x, helpers.init(scheme, x)).traffic

    step = jax.jit(jax.vmap(run, axis_name=helpers.AXIS))
    for density in (0.002, 0.2, 1.0):
        sets = (
            workloads.zipf(n, UNITS, density) if density < 1 else np.ones((n, UNITS), bool)
        )
        x = np.ones((n, UNITS, WIDTH), np.float32) * sets[..., None]
        traffic = step(x)
        found = rounds.of_step(name, sets, WIDTH)
        assert model.sent(found, n) == pytest.approx(float(traffic.wire[0]), rel=1e-6)


def test_a_sum_is_one_round():
    sets = np.ones((4, 10), bool)
    assert rounds.of_step("psum", sets, 8) == [Round("psum", 320)]
    assert Round("psum", 320).sent(4) == 480
    assert Round("all_to_all", 10).sent(4) == Round("all_gather", 10).sent(4) == 30
    with pytest.raises(ValueError, match="powers of two, not 6 ranks"):
        rounds.of_step("hierarchical", np.ones((6, 64), bool), 8)


def measured(kinds, cores, hosts, rates):
    """Rows of collectives that take exactly what a model says."""
    rows = []
    for ranks in hosts:
        for rate in rates:
            for size in (1024, 32_768, 524_288):
                for kind, known in kinds.items():
                    row = {"hosts": ranks, "rate": rate, "collective": kind, "bytes": size}
                    one = model.round_of(row)
                    here = Here.testbed(row, cores)
                    row["cpu"] = known.cpu(one, ranks)
                    rows.append(row | {"seconds": [known.time(one, here)]})
    return rows


KNOWN = {
    "pmax": Collective(1e-3, 1e-5, 0.0, 0.9, 1.0, 2e-4),
    "all_to_all": Collective(1e-4, 1.5e-4, 2e-9, 1.0, 1.7, 1e-3),
    "all_gather": Collective(1e-4, 2e-4, 1e-9, 0.8, 1.1, 3e-4),
    "psum": Collective(1e-3, 3e-4, 2e-9, 0.7, 1.2, 1e-4),
}


def test_a_model_of_collectives_is_found_again():
    rows = measured(KNOWN, 2, (2, 4, 8), ("100mbit", "1gbit"))
    found = model.fitted(rows, 2)
    for row in measured(KNOWN, 2, (16, 64), ("250mbit",)):
        one, here = model.round_of(row), Here.testbed(row, 2)
        of_kind = found[row["collective"]]
        assert of_kind.cpu(one, here.ranks) == pytest.approx(row["cpu"], rel=1e-3)
        assert of_kind.time(one, here) == pytest.approx(row["seconds"][0], rel=1e-3)
        # On hosts of their own no rank waits for another's work.
        own = here._replace(shared=1.0)
        known = KNOWN[row["collective"]].time(one, own)
        assert of_kind.time(one, own) == pytest.approx(known, rel=0.01)
        assert known < row["seconds"][0]


def test_recorded_steps_are_counted_as_they_were_measured():
    _, rows = scale.read("communication")
    row = next(
        row
        for row in rows
        if (row["workload"], row["hosts"], row["scheme"]) == ("lstm", 16, "zen")
    )
    found = scale.counted(row)
    assert [one.collective for one in found][:2] == ["pmax", "all_to_all"]
    assert model.sent(found, 16) == pytest.approx(row["wire"], rel=1e-3)
    assert not scale.counted(row | {"wire": 2 * row["wire"]})


def test_on_gpus_messages_have_the_sizes_that_were_counted():
    _, rows = scale.read(str(scale.records.RESULTS / "device-jax0.11.2.jsonl"))
    row = next(
        row
        for row in rows
        if (row["load"], row["scheme"], row["kernels"]) == ("65,536 x 64", "zen", None)
    )
    units, width, density = gpus.LOADS[row["load"]]
    found = gpus.counted("zen", workloads.zipf(16, units, density), width)
    assert model.sent(found, 16) == pytest.approx(row["sent"], rel=0.01)
    seconds = gpus.device_seconds(row, row["sent"], 16)
    assert seconds == pytest.approx(row["device"], rel=1e-3)
    assert gpus.device_seconds(row, 2 * row["sent"], 1024) < 2 * seconds
