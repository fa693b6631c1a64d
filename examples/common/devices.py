"""The devices of a run, and the share of a batch that each host provides."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh


def mesh(count: int, *, shards: int = 1) -> Mesh:
    """A mesh with the axis "data", over simulated devices or over the present ones.

    Args:
        count: How many CPU devices are simulated; 0 for the devices that JAX has, those of
            all hosts where `jax.distributed` was initialized.
        shards: Along a second axis, "model", if it is not 1.
    """
    devices = simulated(count) if count else jax.devices()
    if len(devices) % shards:
        raise SystemExit(
            f"There are {len(devices)} devices, no multiple of the {shards} that share a "
            "model: choose another number with --devices or --shards."
        )
    sizes = {"data": len(devices) // shards} | ({"model": shards} if shards > 1 else {})
    return jax.make_mesh((*sizes.values(),), (*sizes,), devices=devices)


def simulated(count: int) -> list[jax.Device]:
    """Simulates CPU devices, which must be requested before JAX starts."""
    try:
        jax.config.update("jax_num_cpu_devices", count)
        jax.config.update("jax_platforms", "cpu")
    except RuntimeError:
        pass  # JAX has started, maybe with enough of them.
    devices = jax.devices("cpu")
    if jax.process_count() > 1 and len(devices) != count:
        raise SystemExit(
            f"This job has {len(devices)} devices on {jax.process_count()} processes: take "
            f"them all by --devices 0, in place of the {count} that were asked for."
        )
    if len(devices) < count:
        raise SystemExit(f"{count} devices were asked for; JAX has started {len(devices)}.")
    return devices[:count]


def part(batch: Any) -> Any:
    """This host's share of a batch of all hosts, each of which draws the whole batch."""
    hosts = jax.process_count()
    if hosts == 1:
        return batch

    def cut(x):
        size = len(x) // hosts
        return x[jax.process_index() * size :][:size]

    return jax.tree.map(cut, batch)


def is_first_host() -> bool:
    """Whether this is the first host, which alone prints and writes."""
    return jax.process_index() == 0


def replicas_equal(params: Any) -> bool:
    """Whether devices that should hold the same numbers do, bit for bit."""
    for leaf in jax.tree.leaves(params):
        held = {}
        for shard in leaf.addressable_shards:
            numbers = np.asarray(shard.data).tobytes()
            if held.setdefault(str(shard.index), numbers) != numbers:
                return False
    return True
