"""What ordered sums cost of a step, by the record of what was counted."""

import json

import pytest

from benchmarks.device import compiled, costs
from benchmarks.device.loads import LOADS, RANKS
from benchmarks.harness import record
from sparsejax.wire import ordered


FASTEST = costs.RATES.index(400)
# Of arrays, those whose exchange takes a millisecond: a launch is little of that.
LARGE = [
    name
    for name, load in LOADS.items()
    if costs.on_wire(load.least_sent, 400) > 1e-3 and not load.listed
]


def rows():
    """Those of Zen in plain XLA, by load and scheme."""
    lines = (record.RESULTS / "device-jax0.11.2.jsonl").read_text().splitlines()[1:]
    found = [json.loads(line) for line in lines]
    plain = [row for row in found if row["kernels"] is None]
    return {(row["load"], row["scheme"]): row for row in plain}


def of_ordered(load):
    """What was counted of an ordered sum, and of one in any order."""
    found = rows()
    return found[load, "zen"], found[load, compiled.IN_ANY_ORDER]


@pytest.mark.parametrize("load", LOADS)
def test_ordered_sums_take_launches_and_neither_waits_nor_temporaries(load):
    here, other = of_ordered(load)
    assert 0 < here["launches"] - other["launches"] <= 2 * RANKS
    assert here["waits"] == other["waits"]
    assert here["sent"] == other["sent"]
    assert here["temporary"] <= 1.01 * other["temporary"]
    assert here["device"] - other["device"] <= 0.15e-3


@pytest.mark.parametrize("load", LARGE)
def test_ordered_sums_of_so_many_senders_cost_a_twentieth_of_an_exchange(load):
    here, other = of_ordered(load)
    each = (here["device"] - other["device"]) / RANKS
    whole = other["device"] + other["wire"][FASTEST]
    assert len(LARGE) == 3
    assert ordered.MOST_SENDERS * each <= 0.05 * whole
    # The limit is the largest power of two of which that holds for all of them.
    others = [of_ordered(name) for name in LARGE]
    doubled = [
        2 * ordered.MOST_SENDERS * (a["device"] - b["device"]) / RANKS
        > 0.05 * (b["device"] + b["wire"][FASTEST])
        for a, b in others
    ]
    assert any(doubled)
