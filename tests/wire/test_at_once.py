"""What is traced for GPUs, run on CPUs: one switch a stage, listed sets, sums in runs."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import schemes
from sparsejax.wire import at_once, ladder
from sparsejax.wire.at_once import size_groups, unpacking
from tests import helpers
from tests.laws.test_exact_sum import SCHEMES
from tests.schemes import test_two_level
from tests.wire import test_format, test_messages
from tests.wire.test_messages import Setup


RANKS, SIZE = 3, 3001


@pytest.fixture(autouse=True, scope="module")
def traced_for_gpus():
    test_messages.exchange_of.cache_clear()
    with helpers.for_gpus():
        yield
    test_messages.exchange_of.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words", "capacity"), [("coo8", 33, 40), ("coo16", 2 * 2048 + 5, 4000)]
)
def test_a_message_is_what_its_format_says(name, words, capacity):
    test_format.test_a_message_is_what_its_format_says(name, words, capacity, 16)


SETUPS = {
    "every code": Setup("falling", shape=(3,)),
    "as sizes are": Setup(),
    "rows of bfloat16": Setup("auto", jnp.bfloat16, (3,)),
    "several blocks": Setup("coo16", n=2, width=2 * 65536 + 64, ratio=8),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETUPS)
def test_everything_is_delivered_and_counted_at_any_density(name):
    """From nothing, by one message of each size, to several rounds."""
    rounds = set()
    setup = SETUPS[name]
    for x in test_messages.gradients(setup):
        test_messages.check(setup, x)
        sent = helpers.is_nonzero(x).reshape(setup.n, setup.n, setup.width, -1).any(axis=3)
        rounds.add(len(helpers.rounds_of(setup.ladder, sent.sum(axis=2).max(), 2)))
    assert {0, 1} < rounds


@pytest.mark.slow
@pytest.mark.parametrize("name", ["every code", "as sizes are"])
def test_the_last_of_several_messages_may_be_of_each_of_the_longest_sizes(name):
    setup = SETUPS[name]._replace(shape=())
    steps = setup.ladder
    for rung in steps.rungs:
        count = steps.top + rung.capacity
        x = np.zeros((setup.n, setup.size), np.float32)
        x[:, :count] = 1 + np.arange(count)
        test_messages.check(setup, x)


@pytest.mark.slow
def test_doubles_are_added_up_as_doubles():
    """Where numbers of loops have 64 bits, too."""
    scheme = SCHEMES["zen"]
    x = helpers.gradients(RANKS, 517, 0.05, np.float64, seed=5)
    x += x * 2.0**-40  # more than a float32 holds
    with jax.enable_x64(True):
        run = lambda x: helpers.call(scheme, x, helpers.init(scheme, x)).total
        totals = helpers.ranked(run, RANKS)(x)
    assert totals.dtype == np.float64
    np.testing.assert_array_equal(totals[0], helpers.total(x))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zen", "balanced_algorithm_1"])
def test_messages_are_unpacked_piece_by_piece_where_they_are_received(name, monkeypatch):
    """As where kernels do it, but by reference: sums, swaps, and slots with their names."""
    scheme = SCHEMES[name]

    def run(x):
        return helpers.call(scheme, x, helpers.init(scheme, x))

    plain = helpers.ranked(run, RANKS)
    # Nothing, one message, three that follow one another, densely.
    inputs = [
        helpers.gradients(RANKS, 1600, density, shape=(2,), seed=5)
        for density in (0, 0.05, 0.55, 1)
    ]
    wanted_of = [plain(x) for x in inputs]
    monkeypatch.setattr(unpacking, "unpacks_in_kernels", lambda *_, **__: True)
    monkeypatch.setattr(ladder.Ladder, "pieces_of", lambda steps, rung: 3)
    with helpers.for_gpus():  # by traces of its own
        summed = helpers.ranked(lambda x: run(x), RANKS)
        found_of = [summed(x) for x in inputs]
    rounds = []
    for x, wanted, found in zip(inputs, wanted_of, found_of, strict=True):
        np.testing.assert_array_equal(found.total[0], helpers.total(x))
        helpers.assert_same_on_all_ranks(found.total)
        ways = [[one.traffic.push, one.traffic.pull] for one in (found, wanted)]
        rounds.append([sum(float(way.rounds[0]) for way in one) for one in ways])
        same = [[way._replace(rounds=0) for way in one] for one in ways]
        jax.tree.map(np.testing.assert_array_equal, *same)
    # Nothing and all are in no pieces; a message is what tells its slots, and three runs.
    assert rounds[0] == [0, 0]
    by_messages = 3 if name == "zen" else 2  # the others go densely sooner
    for found, wanted in rounds[1:by_messages]:
        assert wanted < found <= 4 * wanted
    for found, wanted in rounds[by_messages:]:
        assert found == wanted


@pytest.mark.slow
def test_each_group_of_sizes_has_a_program_that_unpacks_it(monkeypatch):
    """Nothing, two rooms for sparse lists, dense lists, bitmaps, and several messages."""
    ranks, size, groups = 4, 200_000, at_once.groups
    inputs = [
        helpers.gradients(ranks, size, density, seed=5)
        for density in (0.0, 0.0005, 0.003, 0.012, 0.05, 0.1)
    ]
    monkeypatch.setattr(size_groups, "_FEW_UNITS", size - 1)
    monkeypatch.setattr(ladder, "_FEW", 1 << 12)  # of which few are short

    def totals():
        scheme = schemes.BalancedParallelism()
        run = lambda x: helpers.call(scheme, x, helpers.init(scheme, x)).total
        return list(map(helpers.ranked(run, ranks), inputs))

    def marked(*args):
        """Groups, of which each adds a number of its own to what it unpacks."""

        def marking(number, group):
            unpack = lambda *args: group.unpack(*args) + 2.0**number
            return group._replace(unpack=unpack)

        found = groups(*args)  # of a push there is one
        return list(itertools.starmap(marking, enumerate(found))) if found[1:] else found

    found = totals()
    for x, total in zip(inputs, found, strict=True):
        helpers.assert_same_on_all_ranks(total)
        np.testing.assert_array_equal(total[0], helpers.total(x))
    monkeypatch.setattr(at_once, "groups", marked)
    added = [
        float(other[0][total[0] == 0].min())
        for total, other in zip(found, totals(), strict=True)
    ]
    # Of several messages each is unpacked by the last.
    assert added == [1, 1, 2, 4, 8, 2 * 16]


@pytest.mark.parametrize("shape", [(97,), *helpers.slow(((3340,),), ((3340, 3),))])
def test_sums_that_come_back_whole_come_in_runs(shape):
    """3,340 units: runs of three words of slots, the last with one of those before."""
    dense = schemes.BalancedParallelism(pull="dense")

    def run(x):
        return helpers.call(dense, x)

    x = helpers.gradients(RANKS, shape[0], 0.02, shape=shape[1:], seed=3)
    done = helpers.ranked(run, RANKS)(x)
    helpers.assert_same_on_all_ranks(done.total)
    np.testing.assert_array_equal(done.total[0], helpers.total(x))


@pytest.mark.slow
def test_sums_of_one_axis_may_vary_over_another():
    test_two_level.program.cache_clear()
    for size in (SIZE, test_two_level.SIZE):
        test_two_level.test_the_total_is_the_sum_over_both_axes(
            schemes.TwoLevel(schemes.Zen()), size, (), np.float32, True
        )
    test_two_level.program.cache_clear()


def test_the_longest_message_is_a_share_of_the_array_and_is_followed_only_where_it_must():
    width, ranks = 1 << 24, 16
    to_all = ladder.Message().ladder(width, 4, ranks, units=ranks * width)
    to_owners = ladder.Message().ladder(width, 4, ranks, units=ranks * width, share=32)
    assert to_all.at_once
    assert to_all.top == -(-(width // 6) // 4) * 4
    assert to_owners.top == width // 32
    for steps in (to_all, to_owners):
        near = [rung.words for rung in steps.rungs if 3 * rung.capacity > steps.top]
        apart = [high / low for low, high in itertools.pairwise(near)]
        assert max(apart) < 1.13
        assert len(steps.rungs) < 28
        rungs = steps.messages_for(steps.top, 15)
        assert rungs == [steps.rungs[-1]]
        need = np.int32(2 * steps.top + 1)
        rungs = steps.messages_for(int(need), 15)
        assert [rung.capacity for rung in rungs[:2]] == [steps.top] * 2
        assert 0.45 * steps.top < rungs[2].capacity < 0.55 * steps.top
        assert steps.bytes(need) == 4 * sum(rung.words for rung in rungs)
