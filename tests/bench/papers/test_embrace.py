"""EmbRace's table 2 against the bytes that each way of exchanging a table counts here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from benchmarks.papers.formulas import embrace
from benchmarks.papers.formulas.embrace import WAYS, Reads
from sparsejax import schemes
from sparsejax.embrace import ColumnTable, column_lookup
from sparsejax.units.row_grads import RowGrads
from tests import helpers


ROWS, DIM, COUNT = 500, 24, 90
SCHEMES = {
    "all-reduce": schemes.AllReduce(),
    "all-gather": schemes.AGSparse(),
    "parallax": schemes.SparsePS(),
    "zen rows": schemes.Zen("balanced"),
}


def drawn(n):
    """Ids [n, COUNT], of which some repeat on a rank and on several, and what they are."""
    rng = np.random.default_rng(n)
    ids = np.minimum(rng.zipf(1.2, (n, COUNT)), ROWS) - 1
    sets = [np.unique(own) for own in ids]
    distinct, union = max(map(len, sets)), len(np.unique(ids))
    assert distinct < min(COUNT, union)
    assert len({len(own) for own in sets}) > 1  # ranks have not as many
    return ids.astype(np.int32), Reads(n, ROWS, DIM, distinct, union)


def counted(way, n):
    """Payload and wire of one exchange, there and back, by the library's own count."""
    ids, _ = drawn(n)
    if way == "hybrid":
        return of_columns(ids, n)
    scheme = SCHEMES[way]
    tx = sparsejax.sync(scheme, reduce="sum", rules={"table": "sparse"})
    like = {"table": jnp.zeros((ROWS, DIM))}

    def on_rank(ids):
        rows = jnp.ones((COUNT, DIM)) * ids[0][:, None]  # of this rank
        grads = RowGrads(ids[0], rows, (ROWS, DIM))
        _, state = tx.update({"table": grads}, tx.init(like))
        return sparsejax.metrics(state)

    on_ranks = helpers.shard_map(
        on_rank, mesh=helpers.mesh_of(n), in_specs=P("data"), out_specs=P()
    )
    numbers = jax.jit(on_ranks)(ids)
    return float(numbers["sync/payload_bytes"]), float(numbers["sync/wire_bytes"])


def of_columns(ids, n):
    mesh = helpers.mesh_of(n)
    table = ColumnTable.of(np.ones((ROWS, DIM), np.float32), mesh)

    def on_rank(table, ids):
        return column_lookup(table, ids[0], traffic=True)[1]

    specs = sparsejax.state_specs(table)
    on_ranks = helpers.shard_map(
        on_rank, mesh=mesh, in_specs=(specs, P("data")), out_specs=P()
    )
    traffic = jax.jit(on_ranks)(table, ids)
    return float(traffic.payload), float(traffic.wire)


FIRST = "all-reduce", "all-gather", "hybrid"


@pytest.mark.parametrize("way", helpers.mostly_slow(WAYS, *FIRST))
def test_each_way_needs_what_its_formula_says(way):
    """To the byte; messages on the wire are no shorter than what is needed."""
    payload, wire = counted(way, 3)
    formula, _ = WAYS[way]
    assert payload == pytest.approx(formula(drawn(3)[1]).bytes, rel=1e-6)
    assert wire >= payload * (1 - 1e-6)


@pytest.mark.parametrize("n", [3, 16])
def test_what_the_paper_leaves_out_is_all_that_differs(n):
    """Without ids table 2 is what is sent, but for servers: see `owners`."""
    reads = Reads(n, 1000, 32, 40, 100, id_bytes=0)
    for way, (here, paper) in WAYS.items():
        if here is not embrace.owners:
            assert here(reads).bytes == pytest.approx(paper(reads).bytes), way
    # Where all ranks read the same rows, sums are no more than what a rank reads.
    same = Reads(n, 1000, 32, 40, 40, id_bytes=0)
    paper = WAYS["parallax"][1](same).bytes
    for formula in (embrace.owners, embrace.servers):
        assert formula(same).bytes == pytest.approx((n - 1) / n * paper)
    assert embrace.servers(same, 2).bytes == pytest.approx(2 * (n - 1) / n * paper)


def test_by_hand():
    """4 ranks, 10 rows of 2 numbers; a rank reads 3 of them, all of them 6."""
    reads = Reads(4, 10, 2, 3, 6)
    assert embrace.all_reduce(reads).bytes == 120  # 2 * 3/4 of 80
    assert embrace.all_gather(reads).bytes == 108  # 3 * 3 rows of 12
    assert embrace.owners(reads).bytes == 81  # 3/4 of 9 rows of 12
    assert embrace.hybrid(reads).bytes == 72  # 2 * 3/4 of 3 rows of 8, and 3 * 3 ids of 4
    assert embrace.servers(reads).bytes == 54  # 2 * 3/4 of 3 rows of 12
