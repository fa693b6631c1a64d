"""Rules by which leaves are treated: the first one holds, and each has an effect."""

import numpy as np
import pytest

import sparsejax
from sparsejax import schemes
from sparsejax.errors import RuleError
from sparsejax.state import observing


def params():
    tables = {name: np.ones((4000, 64), np.float32) for name in "ab"}
    return {"tables": tables, "w": np.ones((64, 2), np.float32)}


def treated(rules, make=sparsejax.zen_sync):
    """The scheme, and the shape of a unit, by which each leaf is summed."""
    (exchange,) = observing.observed(make(rules=rules), params()).exchanges
    return {
        path: (type(bucket.scheme).__name__, bucket.shape)
        for bucket in exchange.buckets
        for path in bucket.paths
    }


ROW = {"tables/a": ("Zen", (64,)), "tables/b": ("Zen", ()), "w": ("AllReduce", ())}
FIRST, OUT = "Put it first, or leave it out", "Leave it out"
SHADOWED = {
    "dense": ({"": "dense", "tables": "sparse"}, "'sparse'", "'' says 'dense'", FIRST),
    "sparse": (
        {"tables": "sparse", "tables/a": "dense"},
        "'dense'",
        "'tables' says 'sparse'",
        FIRST,
    ),
    "units": ({"": "element", "tables": "row"}, "'row'", "'' says 'element'", FIRST),
    "a scheme": (
        {"": schemes.AGSparse(), "tables": "sparse"},
        "'sparse'",
        r"'' says AGSparse\(...\)",
        FIRST,
    ),
    "by several": (
        {"a$": "sparse", "b$": "dense", "tables": schemes.SparCML()},
        r"SparCML\(...\)",
        r"'a\$' says 'sparse' and 'b\$' says 'dense'",
        OUT,
    ),
}


@pytest.mark.parametrize("case", SHADOWED)
def test_a_rule_behind_those_that_hold_for_all_its_leaves_is_refused(case):
    rules, says, earlier, fix = SHADOWED[case]
    last = list(rules)[-1]
    match = rf"the rule '{last}' says {says}, and it has no effect: {earlier}, .*\. {fix}\."
    with pytest.raises(RuleError, match=match):
        sparsejax.zen_sync(rules=rules).init(params())
    if fix == FIRST:
        treated({last: rules[last]} | rules)


@pytest.mark.parametrize("rest", ["", ".*"])
def test_a_rule_for_the_rest_may_have_nothing_left(rest):
    rules = {"tables": "sparse", "w": "sparse", rest: "dense"}
    assert treated(rules) == treated({"": "sparse"})


def test_rules_of_which_each_has_an_effect_are_taken():
    assert treated({"tables/a": "row"}) == ROW
    # Earlier rules hold for some of the leaves, or say something else.
    assert treated({"tables/a": "row", "tables": "element", "": "sparse"}) == ROW | {
        "w": ("Zen", ())
    }
    some = treated({"tables/a": "dense", "": "sparse"})
    assert {path: name for path, (name, _) in some.items()} == {
        "tables/a": "AllReduce",
        "tables/b": "Zen",
        "w": "Zen",
    }
    # What says the same has nothing to lose.
    assert treated({"tables": "sparse", "a": "sparse"}) == treated({"tables": "sparse"})
    assert treated({"": "dense", "a": schemes.AllReduce()}) == treated({"": "dense"})
    # A yardstick has no units.
    treated({"": "element", "tables": "row"}, sparsejax.dense_sync)
