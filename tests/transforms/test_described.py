"""What was made prints as the call that made it."""

import optax
import pytest

import sparsejax
from sparsejax import schemes, sparsifiers
from sparsejax.errors import ArgumentError
from sparsejax.transforms import systems
from tests import helpers


CHAIN = optax.chain(sparsejax.zen_sync(), optax.adam(1e-3))


@pytest.mark.parametrize(
    ("tx", "text"),
    [
        (sparsejax.zen_sync(), "zen_sync()"),
        (
            sparsejax.zen_sync("data", reduce="mean"),
            "zen_sync(axis_name='data', reduce='mean')",
        ),
        (
            sparsejax.sync(schemes.Zen(), rules={"w": "row"}),
            "sync(scheme=Zen(), rules={'w': 'row'})",
        ),
        (
            sparsejax.dgc(0.01, min_size=5, memory=sparsejax.MomentumCorrection(0.5)),
            "dgc(density=0.01, min_size=5, memory=MomentumCorrection(momentum=0.5))",
        ),
        (
            sparsejax.sparsify(sparsifiers.TopK(sparsifiers.Warmup(0.001, 10))),
            "sparsify(sparsifier=TopK(density=Warmup(density=0.001, steps=10)))",
        ),
        (sparsejax.accumulate(CHAIN, 4), "accumulate(tx=chain(...), every=4)"),
        (
            sparsejax.skip_nonfinite(CHAIN, report=True),
            "skip_nonfinite(tx=chain(...), report=True)",
        ),
        (sparsejax.transforms.clip_by_rank(1.5), "clip_by_rank(norm=1.5)"),
    ],
)
def test_it_prints_as_its_call(tx, text):
    assert repr(tx) == str(tx) == text
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    init, update = tx
    assert (init, update) == (tx.init, tx.update)


def test_what_is_long_is_cut():
    plan = sparsejax.Plan(2, ())
    assert repr(sparsejax.sync(plan)) == "sync(scheme=Plan(ranks=2, leaves=()))"
    rules = {f"layer_{i}": "dense" for i in range(20)}
    assert repr(sparsejax.zen_sync(rules=rules)) == "zen_sync(rules=...)"
    bound = sparsejax.bind(CHAIN, helpers.mesh_of(2))
    assert repr(bound).startswith("bind(tx=chain(...), mesh=")
    assert len(repr(bound)) < 200


@pytest.mark.parametrize(
    ("make", "gone", "match"),
    [
        (sparsejax.zen_sync, {"every": 4}, r"zen_sync takes no every=4: .*accumulate\("),
        (sparsejax.zen_sync, {"warmup_steps": 3}, r"no warmup_steps=3: .*warm_up\("),
        (sparsejax.sync, {"scheme": schemes.Zen(), "feedback": 1}, "feedback=1: .*memory="),
        (sparsejax.dgc, {"momentum": 0.9}, r"dgc .*memory=sparsejax.MomentumCorrection\("),
        (sparsejax.ok_topk_sync, {"density": 0.1, "momentum": 0.9}, "ok_topk.*memory="),
        (systems.gtopk_sync, {"density": 0.1, "two_level": True}, "both axes .* leave it"),
    ],
)
def test_an_option_that_is_gone_names_what_to_write(make, gone, match):
    with pytest.raises(ArgumentError, match=match):
        make(**gone)


@pytest.mark.parametrize(
    ("make", "name", "option"),
    [
        (lambda: sparsejax.zen_sync(evry=2), "zen_sync", "evry"),
        (lambda: sparsejax.spardl_sync(0.1, sparsifier=1), "spardl_sync", "sparsifier"),
        (lambda: sparsejax.dgc(0.1, min_sizes=3), "dgc", "min_sizes"),
    ],
)
def test_an_option_that_is_none_is_refused_by_the_function_that_was_called(
    make, name, option
):
    """`Unpack` says it to type checkers alone, and all would reach `sync`."""
    with pytest.raises(TypeError, match=rf"{name}\(\) got an unexpected .*'{option}'"):
        make()
