"""Listed rows by owners: the float64 sum, by ids, with nothing of the table's size."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.schemes import row_lists
from sparsejax.schemes.owners import rows as owned_rows
from sparsejax.units.row_grads import RowGrads
from sparsejax.wire import Wire
from tests import helpers


HEIGHT, WIDTH, COUNT = 5003, 6, 300


# Heights of the tables of one exchange, and how many rows of each a rank lists.
TABLES = {5003: 900, 40: 30, 1: 9, 2003: 100}


@functools.cache
def program_of_tables(n, by_owners=True):
    """From lists of each table to the sums and what was sent, on every rank."""

    def on_rank(lists):
        tables = [
            RowGrads(ids, rows, (height, *rows.shape[1:]))
            for height, (ids, rows) in zip(TABLES, lists, strict=True)
        ]
        wire = Wire(helpers.AXIS)
        totals, traffic = (
            owned_rows.add_up(tables, wire)
            if by_owners
            else row_lists.gathered(tables, wire)
        )
        return [(total.ids, total.rows) for total in totals], traffic

    return helpers.ranked(on_rank, n)


@functools.cache
def program(n, height=HEIGHT, dtype=None, check_vma=True):
    """From ids [n, K] and rows [n, K, width] to the sum and its traffic on every rank."""

    def on_rank(ids, rows):
        grads = RowGrads(ids, rows, (height, *rows.shape[1:]))
        (total,), traffic = owned_rows.add_up([grads], Wire(helpers.AXIS, dtype))
        return total.ids, total.rows, traffic

    return helpers.ranked(on_rank, n, check_vma)


def drawn(n, ids=None, dtype="float32"):
    ids = helpers.listed_ids(n, HEIGHT, COUNT)["uniform"] if ids is None else ids
    return ids, helpers.drawn_rows(ids, WIDTH, dtype)


def assert_sums(n, ids, rows, room=1e-6, **options):
    """The law: distinct ids, all that were listed, their float64 sums, equal bytes."""
    listed, sums, traffic = program(n, **options)(ids, rows)
    helpers.assert_same_on_all_ranks((listed, sums, traffic))
    helpers.assert_sum_of_rows((listed[0], sums[0]), ids, rows, HEIGHT, room)
    return jax.tree.map(lambda x: x[0], traffic)


CASES = helpers.listed_ids(4, HEIGHT, COUNT)


@pytest.mark.slow
def test_rows_of_16_bits_are_added_up_in_float32():
    """Equal rows in every place but one, whose sum 16 bits would lose."""
    ids, rows = drawn(4, CASES["one row"], dtype="bfloat16")
    rows = np.ones_like(rows)
    listed, sums, _ = program(4)(ids, rows)
    assert sums[0][listed[0] == 0].astype(np.float64).ravel().tolist() == [1200.0] * WIDTH


@pytest.mark.slow
def test_rows_of_16_bits_that_all_ranks_receive_are_added_up_in_float32():
    """One owner has too many rows. Of one of them 16 bits would lose 160 of 161 parts."""
    ids, rows = drawn(4, CASES["of one owner"].copy(), dtype="bfloat16")
    row = ids[0, 0]
    ids[ids == row] = HEIGHT
    ids[0, :161] = row
    rows[0, :161] = np.array([200] + [0.25] * 160)[:, None]
    listed, sums, traffic = program(4)(ids, rows)
    assert traffic.pull.wire[0] == 0  # all ranks receive all rows
    assert sums[0][listed[0] == row].astype(np.float64).ravel().tolist() == [240.0] * WIDTH


@pytest.mark.slow
def test_a_narrow_wire():
    ids, rows = drawn(4)
    traffic = assert_sums(4, ids, rows, room=2**-7, dtype=jnp.bfloat16)
    assert traffic.wire < 0.65 * assert_sums(4, ids, rows).wire


@pytest.mark.slow
@pytest.mark.parametrize("by_owners", [True, False])
def test_several_tables_are_one_exchange(by_owners):
    """Each gets its own sums, also where one lists more than there is room for."""
    n = 4
    run = program_of_tables(n, by_owners)
    for case in [*CASES, "one table of one owner"]:
        lists = []
        for height, count in TABLES.items():
            every = helpers.listed_ids(n, max(height, n * count + 1), count)
            ids = every.get(case, every["uniform"])
            if height == 2003 and case not in every:
                # Messages have room for them beside few others; what is theirs has not.
                ids = helpers.of_one_owner(n, height, n * count)[0].reshape(n, count)
            lists.append((ids, helpers.drawn_rows(ids, WIDTH)))
        totals, traffic = run(lists)
        helpers.assert_same_on_all_ranks((totals, traffic))
        for height, total, (ids, rows) in zip(TABLES, totals, lists, strict=True):
            one = jax.tree.map(lambda x: x[0], total)
            helpers.assert_sum_of_rows(one, ids, rows, height, 1e-6, f"{case}, {height}")


@pytest.fixture
def in_runs(monkeypatch):
    """As for GPUs, where what all ranks send comes in runs: here, however short."""
    monkeypatch.setattr(row_lists, "ROUND", 0)
    program.cache_clear()
    program_of_tables.cache_clear()
    with helpers.for_gpus():
        yield
    program.cache_clear()
    program_of_tables.cache_clear()


@pytest.mark.slow
def test_what_all_ranks_send_is_placed_run_by_run(in_runs):
    """By owners in one run, in two and in three; and some numbers, where they are full."""
    crowded = CASES["uniform"].copy()
    crowded[:, :70] = helpers.of_one_owner(4, HEIGHT, 4 * 70)[0].reshape(4, 70)
    rounds = [assert_sums(4, *drawn(4, ids)) for ids in (CASES["zipf"], None, crowded)]
    assert [(one.push.rounds, one.pull.rounds) for one in rounds] == [
        (1, 1),
        (1, 2),
        (1, 3),
    ]
    # Rows of six numbers: in runs of four, of which the second begins with the third.
    full = assert_sums(4, *drawn(4, CASES["of one owner"]))
    assert (full.push.rounds, full.pull.rounds) == (2, 0)
    assert full.push.wire == 3 * COUNT * (4 + 2 * 4 * 4)
    assert full.push.payload < 3 * COUNT * (4 + WIDTH * 4) + 1


@pytest.mark.slow
def test_rows_of_16_bits_and_of_several_tables_are_placed_run_by_run(in_runs):
    for ids in (CASES["uniform"], CASES["of one owner"]):
        ids, rows = drawn(4, ids, dtype="bfloat16")
        assert_sums(4, ids, rows, room=2**-7)
    test_several_tables_are_one_exchange(True)
