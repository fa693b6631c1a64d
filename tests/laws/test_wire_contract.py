"""What a program really sends: read from the program, and compared with the count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax import schemes
from sparsejax.wire import ladder
from tests import helpers
from tests.helpers import collectives, every_platform, mesh_of, rounds_of, sent_bytes


N, SIZE = 4, 40_064  # parts of whole words, so that nothing is padded


def program(scheme):
    def run(x):
        return helpers.call(scheme, x[0])._replace(state=None)

    specs = {"in_specs": P("data"), "out_specs": P()}
    return jax.jit(helpers.shard_map(run, mesh=mesh_of(N), **specs))


def messages(found, name):
    """Operand bytes of each collective of a kind that stands in a ladder, by branch."""
    return [c.bytes for c in found if c.name == name and c.path[-2:-1] == ("while",)]


@pytest.mark.slow
def test_balanced_parallelism_sends_the_rungs_that_the_program_holds():
    """The bytes reported are those of the branches taken, once for each round."""
    run = program(schemes.BalancedParallelism())
    shape = jax.ShapeDtypeStruct((N, SIZE), jnp.float32)
    with every_platform():
        traced = jax.make_jaxpr(run)(shape)
    found = collectives(traced)
    width = SIZE // N
    steps = ladder.Message(ratio=schemes.BalancedParallelism().ratio).ladder(width, 4, N)
    # A branch for each rung, and nothing else, carries messages: first those of the push.
    # On CPUs a pull is an all-to-all of copies, on others a gather of one.
    sent = messages(found, "all_to_all")
    pushes, pulls = sent[: len(steps.rungs)], sent[len(steps.rungs) :]
    assert pushes == pulls == [4 * N * rung.words for rung in steps.rungs]
    assert messages(found, "all_gather") == []
    elsewhere = collectives(traced, "cuda")
    assert messages(elsewhere, "all_to_all") == pushes
    gathers = messages(elsewhere, "all_gather")
    assert gathers == [4 * rung.words for rung in steps.rungs]
    # What the pull is charged is what either of the two programs sends.
    assert [(N - 1) * own for own in gathers] == [(N - 1) / N * copies for copies in pulls]
    scalars = [c for c in found if c.name == "pmax"]
    assert [c.bytes for c in scalars] == [12, 4]
    # Outside the ladders: the dense sum, and the dense gather of the sums.
    rest = [(c.name, c.bytes) for c in found if c.path[-2:-1] != ("while",)]
    assert sorted(rest) == [
        ("all_gather", 4 * width),
        ("pmax", 4),
        ("pmax", 12),
        ("psum", 4 * SIZE),
    ]

    rng = np.random.default_rng(1)
    layout = schemes.BalancedParallelism().ownership.over(SIZE, N)
    part = np.asarray(layout.assign(jnp.arange(SIZE))[0])
    for density in (0.0005, 0.02, 0.3, 0.7):
        mask = rng.random((N, SIZE)) < density
        x = np.where(mask, rng.standard_normal((N, SIZE)), 0).astype(np.float32)
        traffic = run(x).traffic
        counts = np.array([np.bincount(part[m], minlength=N) for m in mask])
        union = np.bincount(part[mask.any(0)], minlength=N)
        push = operands_of(counts.max(), steps, pushes, N - 1)
        pull = operands_of(union.max(), steps, pulls, N - 1)
        assert traffic.push.rounds == len(push)
        assert float(traffic.push.wire) == sum(push) * (N - 1) / N
        if sum(pull) < 4 * N * width:
            assert traffic.pull.rounds == len(pull)
            assert float(traffic.pull.wire) == sum(pull) * (N - 1) / N
        else:
            assert float(traffic.pull.wire) == 4 * width * (N - 1)
        assert float(traffic.scalars) == sum(sent_bytes(c, N) for c in scalars)


def operands_of(need, steps, operands, messages):
    """The operands of the branches that a need takes, one a round."""
    taken = rounds_of(steps, int(need), messages)
    return [operands[steps.rungs.index(rung)] for rung, _ in taken]


def test_hierarchical_centralization_sends_one_message_a_hop():
    run = program(schemes.HierarchicalCentralization())
    shape = jax.ShapeDtypeStruct((N, SIZE), jnp.float32)
    found = collectives(jax.make_jaxpr(run)(shape))
    steps = ladder.Message(ratio=schemes.HierarchicalCentralization().ratio).ladder(
        SIZE, 4, 1
    )
    # The two hops are turns of one loop: a branch a rung, and in it one for each hop.
    in_ladder = [c for c in found if c.name == "ppermute" and c.path.count("while") == 2]
    assert [c.bytes for c in in_ladder] == [
        4 * rung.words for rung in steps.rungs for _ in range(2)
    ]
    dense = [c.bytes for c in found if c.name == "ppermute" and c not in in_ladder]
    assert dense == [4 * SIZE, 4 * SIZE]
    rng = np.random.default_rng(1)
    x = np.where(rng.random((N, SIZE)) < 0.01, 1.0, 0).astype(np.float32)
    traffic = run(x).traffic
    first = (x != 0).sum(1).max()
    second = max(((x[0] + x[1]) != 0).sum(), ((x[2] + x[3]) != 0).sum())
    operands = [4 * rung.words for rung in steps.rungs]
    sent = sum(operands_of(first, steps, operands, 1))
    sent += sum(operands_of(second, steps, operands, 1))
    assert float(traffic.push.wire) == sent
    assert float(traffic.pull.wire) == 0
    # One number is agreed on at first, and one before each hop.
    assert [c.bytes for c in found if c.name == "pmax"] == [4, 4]
    one = next(sent_bytes(c, N) for c in found if c.name == "pmax")
    assert float(traffic.scalars) == 3 * one


HEIGHT, IDS = 5_000, 600


def program_of_rows(scheme):
    def run(ids):
        rows = jnp.ones((IDS, 3)) * ids[0][:, None]
        tables = [sparsejax.RowGrads(ids[0], rows, (HEIGHT, 3))]
        return scheme.rows(tables, helpers.WIRE).traffic

    return jax.jit(
        helpers.shard_map(run, mesh=mesh_of(N), in_specs=P("data"), out_specs=P())
    )


@pytest.mark.parametrize("name", ["AGSparse", *helpers.slow("BalancedParallelism")])
def test_lists_of_rows_are_the_messages_that_the_program_holds(name):
    """A branch for each size, and the bytes reported are those of the branches taken."""
    scheme = getattr(schemes, name)()
    run = program_of_rows(scheme)
    with every_platform():
        traced = jax.make_jaxpr(run)(jax.ShapeDtypeStruct((N, IDS), jnp.int32))
    found = collectives(traced, "cuda")
    row_bytes = 4 * (1 + 3)  # a slot and three numbers
    by_owners = name == "BalancedParallelism"
    sizes = {}
    for kind, ways in (("all_to_all", N), ("all_gather", 1)):
        rungs = [c.bytes for c in found if c.name == kind and c.path[-1].startswith("cond")]
        assert all(size % (ways * row_bytes) == 0 for size in rungs), kind
        sizes[kind] = sorted(size // (ways * row_bytes) for size in rungs)
    assert bool(sizes["all_to_all"]) == by_owners
    # The longest list of a rank; of owners, that of all that fits into their messages.
    room = max(sizes["all_gather"])
    assert room == (N * max(sizes["all_to_all"]) if by_owners else IDS)

    layout = schemes.BalancedParallelism().ownership.over(HEIGHT, N)
    part = np.asarray(layout.assign(jnp.arange(HEIGHT, dtype=jnp.int32))[0])
    rng = np.random.default_rng(1)
    for distinct in (3, 80, 250, 600):
        ids = [np.resize(rng.permutation(HEIGHT)[:distinct], IDS) for _ in range(N)]
        ids = np.stack(ids).astype(np.int32)
        traffic = run(ids)
        own = [np.bincount(part[np.unique(row)], minlength=N) for row in ids]
        after = np.bincount(part[np.unique(ids)], minlength=N)
        needs = {"all_to_all": np.max(own), "all_gather": after.max()}
        if not by_owners:
            needs = {"all_gather": distinct}
        taken = [min(n for n in sizes[kind] if n >= need) for kind, need in needs.items()]
        sent = [(N - 1) * columns * row_bytes for columns in taken]
        stages = [traffic.push.wire, traffic.pull.wire][: len(sent)]
        assert [float(x) for x in stages] == sent, distinct


def test_small_leaves_join_one_psum_and_large_dense_ones_have_their_own():
    tx = sparsejax.dense_sync()
    grads = {"a": jnp.ones(3), "b": jnp.ones((2, 2)), "large": jnp.ones(65_536)}

    def run(x):
        local = jax.tree.map(lambda g: g * x[0], grads)
        return tx.update(local, tx.init(helpers.parameters(local)))[0]

    step = helpers.shard_map(run, mesh=mesh_of(N), in_specs=P("data"), out_specs=P())
    found = collectives(jax.make_jaxpr(step)(jnp.ones(N)))
    assert sorted((c.name, c.bytes) for c in found) == [
        ("psum", 4 * 7),
        ("psum", 4 * 65_536),
    ]
