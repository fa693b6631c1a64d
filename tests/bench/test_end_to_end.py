"""What hosts train on: the same batches, of which each has its part."""

import dataclasses

import numpy as np
import pytest

from benchmarks.data import clicks
from benchmarks.network.end_to_end import options, tasks


@pytest.mark.parametrize("task", options.TASKS)
def test_hosts_have_the_batches_that_were_drawn(task, tmp_path):
    settings = options.Settings(task=task, width=4, millions=0.001, steps=1, rounds=0)
    settings = dataclasses.replace(settings, data=str(tmp_path))
    tasks.write(settings, hosts=2)
    read = tasks.read(settings)
    assert len(read.batches) == settings.count == 3
    parts = [read.of_host(rank, 2) for rank in range(2)]
    for number, batch in enumerate(read.batches):
        for name, whole in batch.items():
            both = [part[number][name] for part in parts]
            np.testing.assert_array_equal(np.concatenate(both), whole)
    if task == "clicks":
        assert read.params["table"].shape == (1000, clicks.WIDTH)


@pytest.mark.parametrize("kind", clicks.KINDS)
def test_ids_of_clicks_are_rows_of_the_table(kind):
    ids, clicked = next(clicks.batches(50_000, kind, ranks=2))
    assert ids.shape == (2 * clicks.BATCH, clicks.FEATURES)
    assert 0 <= ids.min() <= ids.max() < 50_000
    assert set(np.unique(clicked)) == {0, 1}
    counts = np.sort(np.bincount(ids.ravel(), minlength=50_000))
    frequent = counts[-300:].sum() / counts.sum()
    assert (frequent > 0.4) == (kind == "zipf")
