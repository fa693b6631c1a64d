"""Push and pull traced as for GPUs, where each of them has a choice of its own."""

import numpy as np
import pytest

from sparsejax import schemes
from tests import helpers
from tests.laws.test_exact_sum import SCHEMES


RANKS = 3


@pytest.mark.slow
def test_entries_come_back_as_entries_as_all_sums_or_not_at_all():
    scheme = schemes.BalancedParallelism()

    def run(x):
        reduced = helpers.call(scheme, x, helpers.init(scheme, x))
        return reduced.total, reduced.traffic

    sent = {}
    with helpers.for_gpus():
        step = helpers.ranked(run, RANKS)
        for density in (0.0, 0.02, 0.7, 1.0):
            rng = np.random.default_rng(3)
            x = rng.integers(1, 50, (RANKS, 1024, 8)).astype(np.float32)
            x *= rng.random((RANKS, 1024, 1)) < density
            totals, traffic = step(x)
            np.testing.assert_array_equal(totals[0], helpers.total(x))
            helpers.assert_same_on_all_ranks(totals)
            sent[density] = float(traffic.push.wire[0]), float(traffic.pull.wire[0])
    dense = float(traffic.dense[0])
    assert sent[0.0] == (0, 0)
    assert 0 < min(sent[0.02]) <= max(sent[0.02]) < dense / 4
    # Where nearly all sums are there all of them come back; parts have whole words.
    push, pull = sent[0.7]
    assert 0 < push < dense / 2 <= pull < 0.6 * dense
    assert sent[1.0] == (dense / 2, dense / 2)


@pytest.mark.parametrize("name", ["zen", "ag_sparse"])
def test_entries_must_save_more_than_their_launches_take(name):
    """The shortest messages take a quarter of the dense sum's bytes."""
    scheme, size = SCHEMES[name], 1 << 14
    x = helpers.gradients(RANKS, size, 0.001, seed=5)
    dense = 2 * (RANKS - 1) / RANKS * 4 * size
    took = []
    for overhead in (0.2 * dense, dense):
        with helpers.traced_for("cuda", overhead=int(overhead)):
            run = lambda x: helpers.call(scheme, x, helpers.init(scheme, x))
            done = helpers.ranked(run, RANKS)(x)
        np.testing.assert_array_equal(done.total[0], helpers.total(x))
        took.append(float(done.traffic.push.wire[0] + done.traffic.pull.wire[0]))
    assert took[0] <= 0.51 * dense
    assert took[1] == pytest.approx(dense)
