"""Real processes that talk over gloo hold the same bytes as simulated devices."""

import numpy as np
import pytest

from tests.helpers import processes


@pytest.mark.slow
@pytest.mark.multiprocess
def test_processes_are_told_what_differs_and_one_alone_reads_a_state():
    """A collective at the end would wait for the other, which does nothing."""
    worker, address = "tests.laws.disagreeing_worker", processes.free_address()
    both = [processes.start(worker, address, rank) for rank in (0, 1)]
    try:
        processes.printed(both[0], "alone")
        assert both[1].poll() is None
    finally:
        for process in both:
            process.kill()
            process.communicate()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_processes_hold_the_bytes_that_simulated_devices_hold(tmp_path):
    """Three, which are no power of two; the tests below have two."""
    ranks, coordinator = 3, processes.free_address()
    worker = "tests.laws.distributed_worker"
    processes.wait([processes.fork(worker, tmp_path / "simulated.npz", ranks)])
    job = [(tmp_path / f"{rank}.npz", ranks, coordinator, rank) for rank in range(ranks)]
    processes.wait([processes.start(worker, *line) for line in job])
    simulated = np.load(tmp_path / "simulated.npz")
    assert len(simulated.files) == 16
    for rank in range(ranks):
        held = np.load(tmp_path / f"{rank}.npz")
        for name in simulated.files:
            if "1.0_total" in name:
                # The dense sum of three is the back end's own, in an order of its own.
                np.testing.assert_allclose(
                    held[name], simulated[name], rtol=1e-5, atol=1e-6
                )
            else:
                assert held[name].tobytes() == simulated[name].tobytes(), (rank, name)
            first = np.load(tmp_path / "0.npz")[name]
            assert held[name].tobytes() == first.tobytes(), (rank, name)


def by_one_and_by_two(worker, folder):
    """What a worker writes as the only process, and as each of two."""
    coordinator = processes.free_address()
    processes.wait([processes.fork(worker, folder / "all.npz")])
    paths = [folder / f"{rank}.npz" for rank in range(2)]
    processes.wait(
        [processes.start(worker, path, coordinator, i) for i, path in enumerate(paths)]
    )
    return np.load(folder / "all.npz"), [np.load(path) for path in paths]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_processes_that_give_their_own_shares_train_as_one_that_gives_all(tmp_path):
    whole, parts = by_one_and_by_two("tests.training.worker", tmp_path)
    assert len(whole.files) == 36
    for name in whole.files:
        held = [part[name] for part in parts]
        if held[0].shape == whole[name].shape:
            assert held[0].tobytes() == held[1].tobytes(), name
            got = held[0]
        else:
            got = np.concatenate(held)
        np.testing.assert_allclose(got, whole[name], rtol=1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_processes_under_jit_hold_the_bytes_that_simulated_devices_hold(tmp_path):
    """Each process has one replica, of two shards: its parameters, states and metrics."""
    whole, parts = by_one_and_by_two("tests.laws.in_jit_worker", tmp_path)
    names = [{*part.files} for part in parts]
    assert names[0] | names[1] == {*whole.files}
    for part in parts:
        for name in part.files:
            assert part[name].tobytes() == whole[name].tobytes(), name
    # Both have all parameters, and each has the residuals of its replica alone.
    residuals = {name for name in whole.files if "residual.value" in name}
    assert names[0] - names[1] == {name for name in residuals if "(slice(0, 1," in name}
    assert names[1] - names[0] == {name for name in residuals if "(slice(1, 2," in name}
    for of in ("kernel", "table"):
        assert any(np.any(whole[name]) for name in residuals if of in name)
    for chain in ("zen", "dgc"):
        sent, dense = (whole[f"{chain} sync/{of}_bytes"] for of in ("wire", "dense"))
        assert 0 < sent < dense / 2


@pytest.mark.slow
@pytest.mark.multiprocess
def test_processes_hold_the_columns_that_simulated_devices_hold(tmp_path):
    _assert_same(by_one_and_by_two("tests.embrace.worker", tmp_path), 0)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_processes_hold_back_and_carry_what_simulated_devices_do(tmp_path):
    both = by_one_and_by_two("tests.embrace.scheduled_worker", tmp_path)
    # Rows of three tables, and the gradient of the kernel.
    _assert_same(both, 3, 1)
    for part in ("pending", "carried"):
        of_part = [name for name in both[0].files if part in name and "ids" not in name]
        assert of_part
        assert all(np.any(both[0][name]) for name in of_part)


def _assert_same(both, pending, carried=0):
    whole, parts = both
    # Three tables with two moments each, half on each; the kernel's are on both. Of rows
    # that are held back the ids are on both, and each has its own; so with what is carried.
    here = 9 + 3 + 1 + 2 * pending + carried
    assert [len(part.files) for part in parts] == [here] * 2
    assert len(whole.files) == 2 * 9 + 3 + 1 + 3 * pending + 2 * carried
    for part in parts:
        for name in part.files:
            assert part[name].tobytes() == whole[name].tobytes(), name


@pytest.mark.slow
@pytest.mark.multiprocess
def test_processes_that_take_local_steps_hold_one_anchor(tmp_path):
    whole, parts = by_one_and_by_two("tests.rounds.worker", tmp_path)
    for name in whole.files:
        held = [part[name] for part in parts]
        if name.startswith(("held", "offset")):  # each has the rows of its own ranks
            got = np.concatenate(held)
        else:
            got = held[0]
            assert got.tobytes() == held[1].tobytes(), name
        np.testing.assert_allclose(got, whole[name], rtol=1e-5, atol=1e-6, err_msg=name)
    moved = [(whole[f"anchor/{i}/w"] != whole["anchor/0/w"]).any() for i in range(7)]
    assert moved == [False, False, True, True, True, True, True]
    moved = [i for i in range(1, 7) if (whole[f"late/{i}/w"] != whole["late/0/w"]).any()]
    assert moved == [3, 4, 5, 6]
