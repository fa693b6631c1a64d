"""One host of `benchmarks.choosing_network`: every system that chooses what it sends.

The settings come as JSON in the variable CHOOSING.
"""

import hashlib
import json
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import sparsejax
from benchmarks import sides
from benchmarks.testbed import host


AXIS = "data"
CHECKED = 3  # steps after which what was given must be what was applied and is held


def transformations(density: float, ranks: int) -> dict:
    """The systems by name; those in the papers' format, 8 bytes an entry, have a star."""
    plain = {"code": "coo32"}
    return {
        "psum": None,
        "topk_a": sparsejax.topk_a_sync(density, reduce="sum"),
        "topk_a*": sparsejax.topk_a_sync(density, reduce="sum", **plain),
        "gaussian_k": sparsejax.gaussian_k_sync(density, reduce="sum"),
        "topk_dsa": sparsejax.topk_dsa_sync(density, reduce="sum"),
        "topk_dsa*": sparsejax.topk_dsa_sync(density, reduce="sum", **plain),
        "gtopk": sparsejax.gtopk_sync(density, reduce="sum"),
        "gtopk*": sparsejax.gtopk_sync(density, reduce="sum", **plain),
        "ok_topk": sparsejax.ok_topk_sync(density, reduce="sum"),
        "ok_topk*": sparsejax.ok_topk_sync(density, reduce="sum", **plain),
        "ok_topk rotated": sparsejax.ok_topk_sync(density, reduce="sum", split="rotated"),
        "spardl": sparsejax.spardl_sync(density, reduce="sum"),
        "spardl*": sparsejax.spardl_sync(density, reduce="sum", **plain),
        **{
            f"spardl {teams} {between}": sparsejax.spardl_sync(
                density, reduce="sum", teams=teams, between=between
            )
            for teams, between in ((2, "swaps"), (4, "swaps"), (7, "gather"))
            if ranks % teams == 0
        },
    }


def gradient(size: int, rank: int) -> np.ndarray:
    """Long tails, half of the variance shared by the ranks, and no part like another."""
    rng, shared = np.random.default_rng((7, rank)), np.random.default_rng(7)
    x = rng.standard_t(4, size) + shared.standard_t(4, size)
    scale = np.repeat(np.exp(shared.standard_normal(64)), -(-size // 64))[:size]
    return (x * scale).astype(np.float32)


class Side:
    """A system on a gradient of one size, as an optax transformation."""

    def __init__(self, name: str, tx, size: int, mesh: Mesh):
        self.name, self._tx, self._mesh = name, tx, mesh
        self._sharding = NamedSharding(mesh, P(AXIS))
        self._whole = (mesh.size, size)
        self.restart()
        specs = sparsejax.state_specs(self._state) if tx else P()
        mapped = jax.shard_map(
            self._step, mesh=mesh, in_specs=(P(AXIS), specs), out_specs=(P(), specs)
        )
        like = jax.ShapeDtypeStruct(self._whole, jnp.float32, sharding=self._sharding)
        start = time.perf_counter()
        jitted = jax.jit(mapped, donate_argnums=1)
        self.program = jitted.lower(like, self._state).compile()
        self.compiled = time.perf_counter() - start

    def _step(self, x, state):
        if self._tx is None:
            return lax.psum(x[0], AXIS), state
        total, state = self._tx.update({"w": x[0]}, state)
        return total["w"], state

    def restart(self) -> None:
        """Forgets what is held."""
        self._state = ()
        if self._tx is not None:
            params = {"w": jnp.zeros(self._whole[1], jnp.float32)}
            self._state = sparsejax.init(self._tx, params, self._mesh)

    def load(self, x: np.ndarray) -> None:
        self._x = jax.make_array_from_callback(
            self._whole, self._sharding, lambda index: x[None]
        )

    def run(self) -> None:
        self._total, self._state = self.program(self._x, self._state)
        jax.block_until_ready((self._total, self._state))

    def total(self) -> np.ndarray:
        return np.asarray(self._total.addressable_data(0))

    def held(self) -> np.ndarray:
        """What this rank holds."""
        if self._tx is None:
            return np.zeros(self._whole[1], np.float32)
        tree = sparsejax.residuals(self._state)
        return np.asarray(tree["w"].addressable_data(0))[0]

    def told(self) -> dict:
        """What the library says of the last step."""
        found = sparsejax.metrics(self._state)
        keys = ("density_before", "density_after", "rounds", "push_imbalance")
        return {key: float(found[f"sync/w/{key}"]) for key in keys}

    def wire(self) -> float:
        if self._tx is None:
            ranks, size = self._whole
            return 2 * (ranks - 1) / ranks * 4 * size
        return float(sparsejax.metrics(self._state)["sync/wire_bytes"])


def wrong(here: host.Here, side: Side, size: int) -> int:
    """Numbers that were lost; all of them where ranks have other bytes."""
    applied = np.zeros(size)
    for _ in range(CHECKED):
        side.run()
        total = side.total()
        digests = here.gather(hashlib.sha256(total.tobytes()).hexdigest())
        if len(set(digests)) > 1:
            return size
        applied += total
    # Held is summed through a file each rank leaves: no collective is trusted here.
    folder = os.environ["CHOOSING_HELD"]
    np.save(os.path.join(folder, f"{here.rank}.npy"), side.held())
    here.gather(0)
    lost = 0
    if here.rank == 0:
        given, scale = np.zeros(size), np.zeros(size)
        for rank in range(here.ranks):
            x = gradient(size, rank).astype(np.float64)
            given, scale = given + CHECKED * x, scale + CHECKED * np.abs(x)
            applied += np.load(os.path.join(folder, f"{rank}.npy"))
        lost = int((~(np.abs(given - applied) <= 1e-6 * scale)).sum())
    return here.gather(lost)[0]


def main() -> None:
    settings = json.loads(os.environ["CHOOSING"])
    with host.join() as here:
        host.share_compiled(settings["cache"])
        mesh = Mesh(np.array(jax.devices()), (AXIS,), axis_types=(AxisType.Auto,))
        size = settings["size"]
        own = gradient(size, here.rank)
        compiled, lost = [], {}
        for name, tx in transformations(settings["density"], here.ranks).items():
            if settings["only"] and name not in settings["only"]:
                continue
            side = Side(name, tx, size, mesh)
            side.load(own)
            lost[name] = wrong(here, side, size)
            here.say(f"  {name:16} compiled in {side.compiled:.1f} s, lost {lost[name]}")
            compiled.append(side)
        for rate in settings["rates"]:
            here.set_rate(rate)
            told = {
                side.name: side.told() if side.name != "psum" else {} for side in compiled
            }
            for row in sides.timed(here, compiled, settings["rounds"]):
                name = row["scheme"]
                here.report(rate=rate, size=size, wrong=lost[name], **told[name], **row)
            here.say(f"  {rate}: timed")


if __name__ == "__main__":
    main()
