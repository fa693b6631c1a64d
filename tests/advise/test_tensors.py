"""Equation (1) of DRAGONN: which tensors are worth compressing."""

import jax
import jax.numpy as jnp
import pytest

import sparsejax
from sparsejax import sparsifiers
from sparsejax.advise import tensors
from sparsejax.advise.tensors import CompressionCost
from sparsejax.errors import ArgumentError


NETWORK = {"ranks": 16, "network": sparsejax.Network(gbit_per_s=25, latency_us=20)}
OWN = sparsifiers.Dragonn(0.001)


def leaf(size, dtype=jnp.float32):
    return jax.ShapeDtypeStruct((size,), dtype)


def test_a_tensor_pays_where_its_compression_takes_less_than_it_saves():
    """25 Gbit/s, 16 ranks: by hand from the paper's two formulas."""
    cost = CompressionCost(fixed=1e-3, by_number=25e-12)
    pays = sparsejax.advise.worthwhile(sparsifier=OWN, cost=cost, **NETWORK)
    for size in (1 << 16, 1 << 18, 1 << 20, 1 << 24):
        sent = 8 * -(-size // 1000)
        full = 30 * (20e-6 + size * 4 / 16 / 3.125e9)
        sparse = 15 * (20e-6 + sent / 3.125e9)
        assert pays("w", leaf(size)) == (1e-3 + 25e-12 * size < full - sparse)
    assert not pays("w", leaf(0))
    assert not pays("w", leaf(1 << 16))
    assert pays("w", leaf(1 << 24))


def test_what_is_measured_is_remembered_and_can_be_given_instead(monkeypatch, tmp_path):
    calls = []
    seconds = lambda sparsifier, ranks, size: calls.append(size) or 1e-3 + 1e-9 * size
    monkeypatch.setattr(tensors, "_seconds", seconds)
    tensors._measured.cache_clear()
    cost = sparsejax.advise.measure_compression(OWN, 16)
    assert cost.fixed == pytest.approx(1e-3)
    assert cost.by_number == pytest.approx(1e-9)
    assert sparsejax.advise.measure_compression(OWN, 16) == cost
    assert len(calls) == 3
    cost.save(tmp_path / "cost.json")
    assert CompressionCost.load(tmp_path / "cost.json") == cost
    tensors._measured.cache_clear()


@pytest.mark.slow
def test_a_device_can_be_measured(monkeypatch):
    monkeypatch.setattr(tensors, "_SIZES", (1 << 12, 1 << 13, 1 << 14))
    tensors._measured.cache_clear()
    cost = sparsejax.advise.measure_compression(OWN, 4)
    assert 0 < cost.time(1 << 14) < 10
    tensors._measured.cache_clear()


def test_a_cost_that_cannot_be_is_refused():
    with pytest.raises(ArgumentError, match="fixed must be at least 0, got -1"):
        CompressionCost(-1, 0)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"ranks": 0}, "ranks must be a positive int, got 0"),
        ({"network": 25}, r"network must be a sparsejax.Network\(.*, got 25"),
        ({"sparsifier": sparsifiers.Sign()}, "does not select"),
    ],
)
def test_arguments_are_checked_before_anything_is_measured(monkeypatch, change, match):
    monkeypatch.setattr(tensors, "_seconds", lambda *_: pytest.fail("measured"))
    tensors._measured.cache_clear()
    with pytest.raises(ArgumentError, match=match):
        sparsejax.advise.worthwhile(**({"sparsifier": OWN} | NETWORK | change))
    with pytest.raises(ArgumentError, match="ranks must be a positive int"):
        sparsejax.advise.measure_compression(OWN, 0)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "is not JSON"),
        ('{"fixed": "long", "by_number": 1}', "fixed must be at least 0, got 'long'"),
    ],
)
def test_a_file_that_is_no_cost_is_refused(tmp_path, text, match):
    (tmp_path / "cost.json").write_text(text)
    with pytest.raises(ArgumentError, match=rf"the cost in .*cost.json.* {match}"):
        CompressionCost.load(tmp_path / "cost.json")
