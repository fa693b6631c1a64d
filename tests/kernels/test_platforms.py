"""What is chosen by platform is traced alone where the mesh says which it is."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P

from pallas_kernels import platforms
from pallas_kernels.platforms import by_platform
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
