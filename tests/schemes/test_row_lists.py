"""What lists of rows really send: read from the program, and compared with the count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sparsejax import schemes
from sparsejax.schemes import forecast
from sparsejax.units.row_grads import RowGrads
from tests import helpers


N, HEIGHT, WIDTH, COUNT = 4, 5003, 6, 300


def on_rank(scheme, ranks=N):
    def run(ids, rows):
        grads = RowGrads(ids[0], rows[0], (HEIGHT, WIDTH))
        return scheme.rows([grads], helpers.WIRE).traffic

    specs = {"in_specs": P("data"), "out_specs": P()}
    return jax.jit(helpers.shard_map(run, mesh=helpers.mesh_of(ranks), **specs))


@pytest.mark.parametrize(
    ("scheme", "ways"),
    [(schemes.AGSparse(), 1), *helpers.slow((schemes.BalancedParallelism(), 2))],
)
def test_the_bytes_reported_are_those_of_the_messages_taken(scheme, ways):
    """A message size is a branch with one collective, the smallest that has room."""
    run = on_rank(scheme)
    ids = np.random.default_rng(0).integers(0, HEIGHT, (N, COUNT)).astype(np.int32)
    rows = np.ones((N, COUNT, WIDTH), np.float32)
    # Elsewhere than on CPUs a list goes to all in one gather.
    with helpers.every_platform():
        found = helpers.collectives(jax.make_jaxpr(run)(ids, rows), "cuda")
    agreed = sum(helpers.sent_bytes(c, N) for c in found if c.name == "pmax")
    # Owners stand in a branch, beside the lists that go to all as they are.
    sizes = [
        [c for c in found if c.name == name and len(c.path) == ways]
        for name in ["all_gather", "all_to_all"][:ways]
    ]
    row = 4 * (1 + WIDTH)
    for listed in (1, 60, 110, 300):
        traffic = run(np.where(np.arange(COUNT) < listed, ids, HEIGHT), rows)
        distinct = [np.unique(own[:listed]) for own in ids]
        push, pull = needs(scheme, distinct)
        wants = [push] if ways == 1 else [pull, push]
        sent = 0.0
        for messages, want in zip(sizes, wants, strict=True):
            parts = N if messages[0].name == "all_to_all" else 1
            fitting = [c for c in messages if c.bytes >= row * parts * want]
            least = min(fitting, key=lambda c: c.bytes)
            sent += helpers.sent_bytes(least, N)
        np.testing.assert_allclose(traffic.wire, sent + agreed, rtol=1e-6)
        most = max(map(len, distinct))
        if ways == 1:
            np.testing.assert_allclose(traffic.payload, (N - 1) * row * most, rtol=1e-6)


def needs(scheme, distinct):
    """Rows of the fullest message on the way in, and on the way back."""
    if isinstance(scheme, schemes.AGSparse):
        return max(map(len, distinct)), 0
    layout = scheme.ownership.over(HEIGHT, N)
    owners = lambda ids: np.bincount(
        np.asarray(layout.assign(jnp.asarray(ids))[0]), minlength=N
    )
    union = np.unique(np.concatenate(distinct))
    return max(owners(own).max() for own in distinct), owners(union).max()


@pytest.mark.parametrize(
    ("ranks", "count", "to_all"),
    [
        (3, COUNT, True),
        *helpers.slow((4, COUNT, True), (5, COUNT, False), (4, HEIGHT // 3, False)),
    ],
)
def test_few_ranks_send_short_lists_to_all(ranks, count, to_all):
    """Zen's choice for rows, which is settled when the program is traced."""
    ids = jnp.zeros((ranks, count), jnp.int32)
    rows = jnp.zeros((ranks, count, WIDTH))
    found = []
    for scheme in schemes.Zen(), schemes.Zen("balanced"), schemes.AGSparse():
        with helpers.every_platform():
            program = jax.make_jaxpr(on_rank(scheme, ranks))(ids, rows)
        found.append([c.name for c in helpers.collectives(program, "cuda")])
    zen, balanced, gathered = found
    assert zen == (gathered if to_all else balanced)
    assert balanced != gathered


@pytest.mark.parametrize(("ranks", "ratio"), [(3, 1.5), (4, 2.0)])
def test_lists_of_the_same_rows_are_up_to_twice_what_owners_send(ranks, ratio):
    """Of each row n - 1 copies, or one to its owner and back to all; but for padding."""
    listed = 30_000.0
    counts = (listed,) * len(forecast.merged(ranks))
    table = ranks, 1_000_000, 16, "float32"
    load = forecast.Load(*table, counts, room=int(listed), listed=True)
    to_all = schemes.AGSparse().forecast(load)
    owners = schemes.BalancedParallelism().forecast(load)
    assert 0.7 * ratio < to_all.bytes / owners.bytes <= ratio


@pytest.mark.slow
@pytest.mark.parametrize("gather", ["doubling", *helpers.slow("auto", "bruck")])
def test_a_forecast_of_gathered_lists_is_what_a_run_sends(gather):
    """To the byte: by doubling, a row of the gather travels with the number of its rank."""
    rng, scheme = np.random.default_rng(0), schemes.AGSparse(gather=gather)
    ids = np.stack([rng.choice(HEIGHT, COUNT, False) for _ in range(N)]).astype(np.int32)
    traffic = on_rank(scheme)(ids, np.ones((N, COUNT, WIDTH), np.float32))
    sums = [ids[:held].reshape(-1) for held in forecast.merged(N)]
    counts = tuple(float(len(np.unique(listed))) for listed in sums)
    table = N, HEIGHT, WIDTH, "float32"
    load = forecast.Load(*table, counts, room=COUNT, listed=True)
    assert scheme.forecast(load).bytes == float(traffic.push.wire)
