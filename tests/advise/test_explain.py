"""What `explain` says, in Python and on the command line."""

import json

import jax
import jax.numpy as jnp
import optax
import pytest

import sparsejax
from sparsejax import __main__ as command, errors, schemes


PARAMS = {
    "embedding": jax.ShapeDtypeStruct((50_000, 64), jnp.float32),
    "kernel": jax.ShapeDtypeStruct((512, 512), jnp.float32),
    "bias": jax.ShapeDtypeStruct((512,), jnp.float32),
}
NETWORK = {"ranks": 16, "gbit_per_s": 25, "latency_us": 20}


def explained(tx=None, **options):
    tx = optax.chain(sparsejax.zen_sync(), optax.adam(1e-3)) if tx is None else tx
    found = sparsejax.explain(tx, PARAMS, **{**NETWORK, **options})
    return found, {leaf.path: leaf for leaf in found.leaves}


def test_every_leaf_is_explained_in_the_order_of_the_tree():
    found, _ = explained()
    assert [leaf.path for leaf in found.leaves] == ["bias", "embedding", "kernel"]


def test_units_schemes_and_bytes_are_those_of_the_optimizer():
    _, leaves = explained(density={"embedding": 0.01, "kernel": 1.0})
    assert (leaves["embedding"].unit, leaves["embedding"].scheme) == ("row", "Zen")
    assert leaves["bias"].scheme == "dense"
    assert leaves["embedding"].dense_bytes == 2 * 15 / 16 * 4 * 50_000 * 64
    assert leaves["embedding"].sent_bytes < 0.2 * leaves["embedding"].dense_bytes
    assert leaves["embedding"].verdict == ""
    assert leaves["kernel"].verdict == "dense is better here"
    assert leaves["embedding"].capacity > 0
    assert leaves["kernel"].capacity == 0
    assert leaves["embedding"].density == pytest.approx(0.01)
    assert leaves["embedding"].density_after == pytest.approx(1 - 0.99**16)


def test_every_scheme_has_a_time_and_the_chosen_one_is_that_which_runs():
    _, leaves = explained()
    times = leaves["embedding"].milliseconds
    assert set(times) == {
        "chosen",
        "all-reduce",
        "AGsparse",
        "SparCML",
        "OmniReduce",
        "SparsePS",
        "balanced",
        "hierarchical",
    }
    # Of sixteen ranks Zen never takes the hierarchical way, and of two always.
    assert times["chosen"] == times["balanced"] != times["hierarchical"]
    of_two = explained(ranks=2)[1]["embedding"].milliseconds
    # In sizes closer together than the scheme has by itself.
    assert of_two["chosen"] < of_two["hierarchical"] < of_two["balanced"]
    # 20 us for each of 8 messages, and the bytes at 3.125 GB/s.
    dense = 8 * 0.02 + leaves["embedding"].dense_bytes / 3.125e6
    assert times["all-reduce"] == pytest.approx(dense)


def test_below_the_density_named_it_pays_and_above_it_does_not():
    _, leaves = explained()
    limit = leaves["embedding"].pays_below
    assert 0.01 < limit < 1
    # The next density tried is a ninth above.
    for factor, pays in ((1.0, True), (10 ** (1 / 20) * 1.001, False)):
        density = min(1.0, factor * limit)
        _, there = explained(density={"embedding": density})
        times = there["embedding"].milliseconds
        assert (times["chosen"] < times["all-reduce"]) == pays


def test_a_network_may_be_given_as_one():
    tx = sparsejax.zen_sync()
    network = sparsejax.Network(gbit_per_s=25, latency_us=20)
    whole = sparsejax.explain(tx, PARAMS, ranks=16, network=network)
    assert whole == sparsejax.explain(tx, PARAMS, **NETWORK)


def test_a_slow_network_of_few_ranks_pays_more():
    _, slow = explained(gbit_per_s=0.25)
    _, fast = explained(gbit_per_s=400)
    assert slow["kernel"].pays_below > fast["kernel"].pays_below


def test_rules_masks_and_two_levels_are_seen_through():
    inner = optax.masked(
        sparsejax.zen_sync(rules={"kernel": schemes.SparCML()}),
        {"embedding": True, "kernel": True, "bias": False},
    )
    _, leaves = explained(optax.chain(inner, optax.sgd(0.1)))
    assert set(leaves) == {"embedding", "kernel"}
    assert leaves["kernel"].scheme == "SparCML"
    _, leaves = explained(sparsejax.zen_sync(("hosts", "chips")), ranks=(16, 8))
    assert leaves["embedding"].scheme == "two-level Zen"
    # A rank of a host sends its eighth.
    assert leaves["embedding"].dense_bytes == 2 * 15 / 16 * 4 * 50_000 * 64 / 8


def test_what_keeps_something_by_rank_needs_no_mesh():
    _, leaves = explained(sparsejax.zen_sync(every=4))
    assert leaves["embedding"].scheme == "Zen"
    scheme = schemes.BalancedParallelism(ownership=sparsejax.units.ownership.MurmurHash())
    _, leaves = explained(sparsejax.sync(scheme))
    assert leaves["embedding"].scheme == "BalancedParallelism"


def test_the_table_and_json_say_the_same():
    found, leaves = explained(density=0.02)
    text = str(found)
    assert "16 ranks, 25 Gbit/s, 20 us; density given as 0.02" in text
    assert "dense is better here" in text
    read = json.loads(found.to_json())
    assert read["leaves"][1]["sent_bytes"] == leaves["embedding"].sent_bytes
    for leaf in leaves:
        assert leaf in text


def test_bad_input_is_refused():
    for options, match in (
        ({"ranks": 0}, "ranks must be a positive int"),
        ({"ranks": (4, 2, 1)}, "ranks must be a positive int, or a pair"),
        ({"ranks": (4, 2)}, "ranks is a pair, and the synchronization has one level"),
        ({"latency_us": float("nan")}, "latency_us must be at least 0, got nan"),
        ({"density": "0.1"}, "density must be a number"),
        ({"density": []}, "density must be a number"),
        ({"gbit_per_s": 0}, "gbit_per_s must be above 0, got 0"),
        ({"gbit_per_s": None}, "gbit_per_s is missing"),
        ({"network": sparsejax.Network(1, 1)}, "pass network alone"),
        ({"density": {"": "much"}}, r"density must lie in \[0, 1\], got 'much'"),
        ({"density": 2}, r"density must lie in \[0, 1\]"),
    ):
        with pytest.raises(errors.ArgumentError, match=match):
            explained(**options)
    with pytest.raises(errors.ArgumentError, match="no sparsejax synchronization"):
        explained(optax.adam(1e-3))
    with pytest.raises(errors.ArgumentError, match="no sparsejax synchronization"):
        explained(schemes.Zen())
    with pytest.raises(errors.ArgumentError, match="has two levels, and ranks is one"):
        explained(sparsejax.zen_sync(("hosts", "chips")))
    with pytest.raises(errors.RuleError, match="'embeding' matches no leaf"):
        explained(density={"embeding": 0.1})
    with pytest.raises(errors.RuleError, match="not a regular expression"):
        explained(density={"(": 0.1})
    huge = {"w": jax.ShapeDtypeStruct((100_000, 100_000), jnp.float32)}
    with pytest.raises(errors.ArgumentError, match="leaf 'w' has 10,000,000,000 units"):
        sparsejax.explain(sparsejax.zen_sync(), huge, **NETWORK)
    dense = sparsejax.explain(sparsejax.zen_sync(rules={"w": "dense"}), huge, **NETWORK)
    assert dense.leaves[0].milliseconds["balanced"] is None


def test_explaining_leaves_the_optimizer_as_it_was():
    """Nor does it matter what was traced before."""
    tx = sparsejax.zen_sync()
    params = {"embedding": jnp.zeros((9000, 8))}
    before = jax.eval_shape(tx.init, params)
    for density in (0.1, 0.2):
        found = sparsejax.explain(tx, params, **NETWORK, density=density)
        assert found.leaves[0].density == pytest.approx(density)
    after = jax.eval_shape(tx.init, params)
    assert jax.tree.structure(before) == jax.tree.structure(after)
    assert set(jax.jit(tx.init)(params).inner.traffic) == {"embedding"}


def test_empty_leaves_and_single_arrays_are_explained():
    params = {"none": jax.ShapeDtypeStruct((0, 5), jnp.float32), **PARAMS}
    found = sparsejax.explain(sparsejax.zen_sync(), params, **NETWORK)
    assert "none [0, 5]" in str(found)
    one = sparsejax.explain(sparsejax.zen_sync(), PARAMS["embedding"], **NETWORK)
    assert "value [50000, 64]" in str(one)


def test_a_leaf_is_held_against_a_dense_sum_of_its_own_wire_dtype():
    wide, narrow = (
        explained(sparsejax.zen_sync(wire_dtype=dtype))[1]["embedding"]
        for dtype in (None, jnp.bfloat16)
    )
    assert narrow.dense_bytes == wide.dense_bytes / 2


def test_patterns_may_lie_in_different_synchronizations():
    tx = optax.partition(
        {"rows": sparsejax.zen_sync(), "rest": sparsejax.dense_sync()},
        {"embedding": "rows", "kernel": "rest", "bias": "rest"},
    )
    _, leaves = explained(tx, density={"embedding": 0.1, "kernel": 0.2, "": 0.5})
    assert leaves["embedding"].density == pytest.approx(0.1)
    assert leaves["kernel"].density == pytest.approx(0.2)
    assert leaves["bias"].density == pytest.approx(0.5)


MODEL = ["--leaf", "embedding=5000x64", "--leaf", "bias=100:bfloat16"]
ARGUMENTS = ["--ranks", "8", "--gbit-per-s", "10", "--latency-us", "5"]


def test_the_command_prints_a_table_or_json(capsys):
    assert command.main(["explain", *MODEL, *ARGUMENTS]) == 0
    assert "embedding [5000, 64]" in capsys.readouterr().out
    assert command.main(["explain", *MODEL, *ARGUMENTS, "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["ranks"] == 8
    assert read["leaves"][0]["dtype"] == "bfloat16"


def test_the_command_reads_models_and_plans(capsys, tmp_path):
    name = f"{__name__}:model" if "." in __name__ else "tests.advise.test_explain:model"
    assert command.main(["explain", name, *ARGUMENTS, "--inner", "2"]) == 0
    assert "two-level Zen" in capsys.readouterr().out
    leaf = sparsejax.advise.LeafPlan(
        "a", (70_000,), "float32", "element", schemes.AGSparse()
    )
    sparsejax.Plan(8, (leaf,)).save(tmp_path / "plan.json")
    plan = ["--plan", str(tmp_path / "plan.json")]
    assert command.main(["explain", *plan, *ARGUMENTS]) == 0
    assert "AGSparse" in capsys.readouterr().out
    other = ["--ranks", "4", *ARGUMENTS[2:]]
    assert command.main(["explain", *plan, *other]) == 2
    assert "made for 8 ranks, and there are 4" in capsys.readouterr().err


def model():
    return PARAMS


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ([], "nothing to explain"),
        (["--leaf", "x"], "a leaf is written"),
        (["nowhere"], "written module:name"),
        (["nowhere:x"], "nowhere"),
        ([*MODEL, "--leaf-density", "embedding=lots"], "a density is written"),
        ([*MODEL, "--leaf-density", "nothing=0.1"], "matches no leaf"),
        ([*MODEL, "--leaf-density", "0.1"], "a density is written"),
        ([*MODEL, *MODEL], "given twice"),
        (["a:b", *MODEL], "not both"),
        (["--leaf", "w=4x4:garbage"], "garbage"),
        (["--plan", "nowhere.json"], "nowhere.json"),
    ],
)
def test_the_command_says_what_is_wrong(arguments, match, capsys):
    assert command.main(["explain", *arguments, *ARGUMENTS]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert match in told
