"""Traffic as one array: what a state keeps of it."""

import jax
import numpy as np

from sparsejax.schemes import base


def test_traffic_as_one_array_is_read_as_it_was():
    numbers = iter(range(1, 14))
    stages = (base.stage(*(next(numbers) for _ in range(4))) for _ in range(2))
    traffic = base.Traffic(*stages, *(np.float32(next(numbers)) for _ in range(5)))
    one = traffic.as_one()
    assert one.shape == (13,)
    assert len(set(np.asarray(one).tolist())) == 13
    back = base.Traffic.of_one(one)
    assert jax.tree.map(float, back) == jax.tree.map(float, traffic)
    # Of several ranks, as outside of shard_map.
    several = base.Traffic.of_one(np.stack([one, one + 1]))
    np.testing.assert_array_equal(several.push.rounds, [3, 4])
    np.testing.assert_array_equal(several.inside, [13, 14])
