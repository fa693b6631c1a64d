"""What is chosen by platform is traced alone where the mesh says which it is."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P

from pallas_kernels import platforms
from pallas_kernels.platforms import by_platform
from pallas_kernels.reference import ordered, slots
from sparsejax.units import merging
from tests import helpers


CPU, OTHER = 3.0, 5.0


def chosen(x):
    return by_platform(x, cpu=lambda x: x * CPU, default=lambda x: x * OTHER)


def traced(mesh):
    """The factors in what is traced for the devices of a mesh, or under `jit` alone."""
    run = jax.jit(chosen)
    if mesh is not None:
        run = helpers.shard_map(chosen, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    text = str(jax.make_jaxpr(run)(jnp.ones(2)))
    return {factor for factor in (CPU, OTHER) if f"{factor}:f32" in text}


def test_over_cpu_devices_nothing_else_is_traced():
    assert traced(helpers.mesh_of(2)) == {CPU}


def test_where_no_device_is_known_all_is_traced():
    assert traced(None) == {CPU, OTHER}
    assert traced(AbstractMesh((2,), ("data",), (AxisType.Auto,))) == {CPU, OTHER}


def test_a_program_for_all_platforms_runs_what_suits_this_one():
    assert jax.jit(chosen)(1.0) == CPU
    with helpers.every_platform():
        assert traced(helpers.mesh_of(2)) == {CPU, OTHER}


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_over_other_devices_what_is_for_cpus_is_left_out(platform, monkeypatch):
    monkeypatch.setattr(platforms, "traced_for", lambda: platform)
    assert traced(helpers.mesh_of(2)) == {OTHER}


# --- What a TPU does otherwise than a GPU.


def largest_scatter(platform):
    """The updates of the largest scatter that lists two sets of 65,536 units each."""
    words = jax.ShapeDtypeStruct((2, 2048), jnp.uint32)
    run = lambda words: slots.slots_of(words, jnp.int32(0), 512)
    over = helpers.described(platform, data=2)
    mapped = jax.shard_map(run, mesh=over, in_specs=P(), out_specs=P())
    return max(helpers.scatters(jax.make_jaxpr(mapped)(words)))


def test_on_tpus_sets_are_searched_and_on_gpus_each_unit_writes_itself():
    assert largest_scatter("tpu") <= 2 * 2048  # marks, at most one a word
    for platform in ("cuda", "rocm"):
        assert largest_scatter(platform) == 2 * 65_536


def sorting(run, *like):
    """The platforms for which a program has a sort."""
    found = set()
    for platform in ("cpu", "tpu", "cuda", "rocm"):
        over = helpers.described(platform, data=1)
        mapped = jax.shard_map(run, mesh=over, in_specs=P(), out_specs=P())
        with jax.sharding.use_abstract_mesh(over):
            program = str(jax.make_jaxpr(mapped)(*like))
        found |= {platform} if " sort[" in program else set()
    return found


def test_what_is_sorted_by_platform():
    """Equal ids on TPUs, where a scatter of repeated flags is a sort, and more; and rows
    whose places may repeat only where additions may be atomic.
    """
    run = lambda ids: merging.merged(ids, 1000).ids
    assert sorting(run, jnp.zeros(64, jnp.int32)) == {"tpu"}
    rows, places = jnp.zeros((64, 2)), jnp.zeros(64, jnp.int32)
    assert sorting(ordered.add_repeated, rows, places, rows) == {"cuda", "rocm"}


def test_a_program_for_all_platforms_has_a_way_of_its_own_for_tpus():
    ways = {"cpu": CPU, "tpu": 7.0, "cuda": OTHER}
    choose = lambda x: by_platform(
        x, cpu=lambda x: x * CPU, tpu=lambda x: x * 7.0, default=lambda x: x * OTHER
    )
    traced = jax.jit(choose).trace(jnp.float32(1))
    for platform, factor in ways.items():
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        kept = [f for f in ways.values() if f"dense<{f:e}>" in text]
        assert kept == [factor], platform
