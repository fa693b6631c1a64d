"""Selected values in few bits: what travels, what waits, and what is added up.

The law, in NumPy's float64: the sum of gradients is the sum of updates and residuals, for
every sparsifier and code. What a rank sent is what all ranks add up.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax import schemes, sparsifiers
from sparsejax.errors import ArgumentError
from sparsejax.transforms import PerReplica
from sparsejax.wire.value_codes import CODES, coded
from tests import helpers
from tests.chunked import reference
from tests.laws.test_conservation import SPARSIFIERS


N, STEPS, DENSITY = 4, 6, 0.02
SHAPES = {"v": (40, 125), "w": (20_011,), "z": (7,)}  # the last is sent whole
LARGE = ("v", "w")
RULES = dict.fromkeys(LARGE, "sparse")
NETWORK = sparsejax.Network(gbit_per_s=25, latency_us=20)
AUTO = schemes.AGSparse(code="auto")


def chain(values, scheme=AUTO, kind="TopK", **options):
    """The sparsifier with a code, and a scheme."""
    own = {"min_size": 100, "values": values} | options
    before = sparsejax.sparsify(SPARSIFIERS[kind](DENSITY), **own)
    return optax.chain(before, sparsejax.sync(scheme, reduce="sum", rules=RULES))


def gradients(n=N, dtype="float32"):
    rng = np.random.default_rng(n)
    draw = lambda shape: rng.standard_t(3, (n, STEPS, *shape)).astype(dtype)
    return {name: draw(shape) for name, shape in SHAPES.items()}


@functools.cache
def run(values, scheme=AUTO, kind="TopK", n=N):
    return helpers.ranks(n)(chain(values, scheme, kind), gradients(n), sparsejax.metrics)


def explained(values, scheme=AUTO, n=N, **options):
    params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    tx = chain(values, scheme, **options)
    return sparsejax.explain(tx, params, ranks=n, network=NETWORK)


def test_what_is_not_there_has_no_part_in_a_table():
    rng = np.random.default_rng(0)
    x = rng.standard_normal(300).astype(np.float32)
    real = rng.random(300) < 0.7

    def both(x):
        found = [coded(x, real, name, jnp.float32) for name in CODES]
        for (values, own), code in zip(found, CODES.values(), strict=True):
            decoded = code.decode(own.codes.astype(jnp.uint32), own.table[0])
            yield values[real], jnp.where(real, decoded, 0) - values

    found = jax.jit(lambda x: [*both(x)])(np.where(real, x, 0))
    assert not any(np.asarray(difference).any() for _, difference in found)
    found = [values for values, _ in found]
    for name, back in zip(CODES, found, strict=True):
        wanted = reference.QUANTIZED[name](x[real].astype(np.float64))
        np.testing.assert_allclose(back, wanted, rtol=2e-6, err_msg=name)


# One in slots, one beside them with a table, and one without: the others differ in a table
# of numbers, which `tests/chunked/test_codes.py` holds to NumPy.
@pytest.mark.slow
@pytest.mark.parametrize("values", ["2bit", *helpers.slow("int8", "bfloat16")])
def test_conserved_in_the_bits_that_are_explained(values):
    done = run(values)
    helpers.assert_conserved(gradients(), done)
    last = {k: float(v[0, -1]) for k, v in done.seen.items()}
    row, _ = explained(values).rows
    agreed = 2 * (N - 1) / N * 4
    assert last["sync/v and 1 more/wire_bytes"] == row.sent_bytes + agreed
    assert last["sync/v and 1 more/rounds"] == row.rounds
    assert helpers.held(done.state)["w"].any()


@pytest.mark.parametrize("values", CODES)
def test_a_message_has_the_words_of_its_format(values):
    row, _ = explained(values).rows
    assert (row.values, row.coded) == (values, True)
    # Words of a rank's message: the count, octets of slots, a one for each entry and a zero
    # after each 256 slots, wide codes; a table for each leaf. Narrow codes are in slots.
    entries = sum(math.ceil(DENSITY * math.prod(SHAPES[name])) for name in LARGE)
    room = 4 * math.ceil(entries / 4)
    slots = 32 * math.ceil(sum(math.prod(SHAPES[name]) for name in LARGE) / 32)
    bits, table = CODES[values].bits, CODES[values].table
    slots <<= bits if bits < 8 else 0
    string = math.ceil((room + math.ceil(slots / 256)) / 32)
    beside = room * bits // 32 if bits >= 8 else 0
    words = 1 + room // 4 + string + beside + len(LARGE) * table
    assert row.sent_bytes == (N - 1) * 4 * words


# A code is of what was selected, however it was: by another number each step, or by hashes.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "values"), [("ReuseThreshold", "4bit"), ("Dragonn", "sign")]
)
def test_every_sparsifier_and_code(kind, values):
    helpers.assert_conserved(gradients(), run(values, kind=kind))


@pytest.mark.slow
def test_a_gather_by_doubling():
    n, values, scheme = 3, "int8", schemes.AGSparse("doubling")
    done = run(values, scheme, n=n)
    helpers.assert_conserved(gradients(n), done)
    (row, _), name = explained(values, scheme, n).rows, "sync/v and 1 more/wire_bytes"
    agreed = 2 * (n - 1) / n * 4
    assert done.seen[name][0, -1] == pytest.approx(row.sent_bytes + agreed, 1e-6)


@pytest.mark.slow
def test_gpus_add_up_the_same():
    wanted = run("2bit")
    with helpers.for_gpus():
        found = helpers.ranks(N)(chain("2bit"), gradients())
    assert helpers.octets(found.updates) == helpers.octets(wanted.updates)


def test_an_entry_takes_as_many_bits_as_pages_say():
    params, n = {"w": jax.ShapeDtypeStruct((1 << 20,), jnp.float32)}, 8
    for density, values, wanted in (
        (0.01, None, 41.4),
        (0.01, "2bit", 10.6),
        (0.001, None, 45.1),
        (0.001, "2bit", 17.2),
    ):
        own = sparsejax.top_k(density, values=values)
        tx = optax.chain(own, sparsejax.sync(AUTO))
        (row,) = sparsejax.explain(tx, params, ranks=n, network=NETWORK).rows
        own_bits = 8 * row.sent_bytes / (n - 1) / (density * (1 << 20))
        assert round(own_bits, 1) == wanted


@pytest.mark.slow
def test_what_is_not_finite_shows():
    grads = gradients()
    grads["w"][1, 2, 5] = np.nan
    watch = lambda state: sparsejax.residuals(state)
    done = helpers.ranks(N)(chain("2bit"), grads, watch)
    bad = ~np.isfinite(done.updates["w"][0])
    assert bad.any(axis=1).tolist() == [False, False, True, False, False, False]
    assert bad[2].sum() == math.ceil(DENSITY * math.prod(SHAPES["w"]))
    assert np.isfinite(done.updates["v"]).all()
    assert np.isfinite(done.seen["w"]).all()
    assert not done.seen["w"][1, 2, 0, bad[2]].any()


# --- Schemes that send sums have no code for them, and say so.

SUMS = [schemes.Zen(), schemes.SparCML(), schemes.AllReduce(), schemes.AGSparse()]


@pytest.mark.slow
def test_rounded_values_are_conserved_where_sums_travel():
    helpers.assert_conserved(gradients(), run("2bit", schemes.SparCML()))


def test_explain_says_where_codes_do_not_travel():
    for scheme in SUMS:
        told = explained("2bit", scheme)
        is_coded = isinstance(scheme, schemes.AGSparse)
        row = told.rows[0]
        assert (row.values, row.coded) == ("2bit", is_coded)
        assert "TopK in 2bit, " in str(told)
        assert ("travel in no fewer bits" in str(told)) is not is_coded
    # A dtype of the wire that is narrower than the code wins.
    narrow = schemes.AGSparse(wire_dtype=jnp.bfloat16)
    assert explained("int8", narrow).rows[0].coded
    assert not explained("float32", narrow).rows[0].coded


@pytest.mark.slow
def test_a_dtype_of_the_wire_narrows_what_is_not_in_a_code():
    scheme = schemes.AGSparse(code="auto", wire_dtype=jnp.bfloat16)
    large = {name: x for name, x in gradients().items() if name in LARGE}
    helpers.assert_conserved(large, run("2bit", scheme))
    narrow, whole = (explained("float32", x).rows[0] for x in (scheme, AUTO))
    assert narrow.sent_bytes < whole.sent_bytes


# --- Around it: a dense beginning, other dtypes, jit, and what is refused.


@pytest.mark.slow
def test_a_dense_warm_up_sends_no_codes():
    tx = sparsejax.warm_up(chain("2bit"), 3)
    done = helpers.ranks(N)(tx, gradients(), sparsejax.metrics)
    helpers.assert_conserved(gradients(), done)
    sent = done.seen["sync/wire_bytes"][0]
    assert (sent[:3] > 10 * sent[3:]).all()


@pytest.mark.slow
def test_under_jit():
    """Codes go out of one `shard_map` and into the next."""
    mesh, tx = helpers.mesh_of(N), chain("2bit")
    grads = {name: x[:, 0] for name, x in gradients().items()}
    params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}

    def on_rank(grads, params):
        return tx.update(jax.tree.map(lambda x: x[0], grads), tx.init(params))[0]

    wanted = jax.jit(
        helpers.shard_map(on_rank, mesh=mesh, in_specs=(P("data"), P()), out_specs=P())
    )(grads, params)
    with jax.set_mesh(mesh):
        params = {k: helpers.placed(x, mesh, P()) for k, x in params.items()}
        state = sparsejax.init(tx, params)
        put = lambda x: PerReplica(helpers.placed(x, mesh, P("data")), "data")
        found, _ = jax.jit(tx.update)(jax.tree.map(put, grads), state, params)
    for name in SHAPES:
        assert np.asarray(found[name]).tobytes() == np.asarray(wanted[name]).tobytes()


def test_what_is_refused():
    with pytest.raises(ArgumentError, match=r"values must be one of .*got 'no code'"):
        sparsejax.top_k(0.01, values="no code")
    with pytest.raises(ArgumentError, match=r"QSGD.* rounds all elements by itself"):
        sparsejax.sparsify(sparsifiers.QSGD(), values="2bit")
    before = sparsejax.top_k(DENSITY, min_size=100, values="2bit")
    after = sparsejax.sync(AUTO, rules={"w": "sparse"})

    def on_rank(grads):
        params = {"w": jnp.zeros(SHAPES["w"])}
        sent, _ = before.update({"w": grads["w"][0]}, before.init(params))
        halved = sent["w"].__class__(**{**vars(sent["w"]), "values": sent["w"].values / 2})
        return after.update({"w": halved}, after.init(params))[0]

    spec = {"mesh": helpers.mesh_of(N), "in_specs": P("data"), "out_specs": P()}
    with pytest.raises(ArgumentError, match="values, which are in the code '2bit'"):
        jax.eval_shape(helpers.shard_map(on_rank, **spec), {"w": gradients()["w"][:, 0]})
