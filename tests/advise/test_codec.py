"""Dataclasses as JSON and back."""

import dataclasses
import json

import jax.numpy as jnp
import pytest

import sparsejax
from sparsejax import schemes
from sparsejax.advise import codec
from sparsejax.errors import ArgumentError, PlanError
from sparsejax.schemes.base import Scheme
from sparsejax.schemes.forecast import Network
from sparsejax.units.ownership import MurmurHash


@dataclasses.dataclass(frozen=True)
class Inner:
    count: int
    name: str = "plain"


@dataclasses.dataclass(frozen=True)
class Outer:
    scheme: Scheme
    shape: tuple[int, ...]
    parts: tuple[Inner, ...] = ()
    network: Network | None = None


VALUE = Outer(
    schemes.Zen(ownership=MurmurHash(3), wire_dtype=jnp.bfloat16),
    (4, 2),
    (Inner(1), Inner(2, "other")),
    Network(25, 20),
)


def test_what_is_written_is_read_again():
    text = codec.dumps(VALUE)
    assert codec.decode(Outer, codec.loads(text, "it"), "it") == VALUE
    bare = Outer(schemes.AllReduce(), ())
    assert codec.decode(Outer, codec.encode(bare), "it") == bare


def test_defaults_are_left_out_and_names_are_those_of_classes():
    assert codec.encode(VALUE) == {
        "scheme": {
            "name": "Zen",
            "ownership": {"name": "MurmurHash", "seed": 3},
            "wire_dtype": "bfloat16",
        },
        "shape": [4, 2],
        "parts": [{"count": 1}, {"count": 2, "name": "other"}],
        "network": {"gbit_per_s": 25, "latency_us": 20},
    }
    assert codec.encode(Outer(schemes.AllReduce(), ())) == {
        "scheme": {"name": "AllReduce"},
        "shape": [],
    }
    assert list(json.loads(codec.dumps(Inner(1), format=1))) == ["format", "count"]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"scheme": "Zenn"}, "it: unknown scheme 'Zenn'; there are AGSparse"),
        # A scheme that leaves something out is none for a file.
        ({"scheme": "OkTopk"}, "it: unknown scheme 'OkTopk'"),
        ({"scheme": ["Zen"]}, r"it: unknown scheme \['Zen'\]"),
        ({"scheme": {"name": "Zen", "wire_dtype": "x"}}, "it: Zen: wire_dtype must be"),
        ({"shape": 3}, "it: shape must be a list, got 3"),
        ({"parts": [{}]}, "it: parts has no 'count'"),
        ({"parts": [{"count": 1, "name": 2}]}, "it: parts: name must be a string, got 2"),
        ({"network": {"gbit_per_s": 0, "latency_us": 1}}, "it: network: gbit_per_s must"),
        ({"colour": 1}, "it has an unknown key 'colour'; its keys are network, parts"),
    ],
)
def test_a_mistake_is_named(change, match):
    with pytest.raises(ArgumentError, match=match):
        codec.decode(Outer, codec.encode(VALUE) | change, "it")


def test_what_is_no_object_is_refused():
    with pytest.raises(ArgumentError, match="it must be a JSON object, got list"):
        codec.decode(Inner, [], "it")
    with pytest.raises(ArgumentError, match="it is not JSON"):
        codec.loads("{", "it")


def test_a_key_that_is_there_twice_is_an_error_that_names_it_and_its_values():
    match = "^it has the key 'a' more than once in one object, with 1 and 2: keep one"
    with pytest.raises(ArgumentError, match=match):
        codec.loads('[{"b": 3, "a": 1, "c": 1, "a": 2}]', "it")
    text = sparsejax.Plan(ranks=4, leaves=()).to_json()
    text = text.replace('"ranks": 4', '"ranks": 4, "ranks": 8')
    with pytest.raises(PlanError, match=r"the plan has the key 'ranks' .* 4 and 8: keep"):
        sparsejax.Plan.from_json(text)
