"""What lists of rows really send: read from the program, and compared with the count."""

import jax
import jax.numpy as jnp
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
