"""One host of `benchmarks.choosing_network`: every system that chooses what it sends.

The settings come as JSON in the variable CHOOSING.
"""

import hashlib
import json
import os

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

import sparsejax
from benchmarks import sides
from benchmarks.choosing_systems import STEPS, gradients, side, transformations
from benchmarks.jax_side import AXIS, JaxSide
from benchmarks.testbed import host


def held(side: JaxSide) -> np.ndarray:
    """What this rank holds."""
    if not side.state:
        return np.zeros(side.whole[1], np.float32)
    tree = sparsejax.residuals(side.state)
    return np.asarray(tree["w"].addressable_data(0))[0]


def told(side: JaxSide) -> dict:
    """What the library says of the last step."""
    if not side.state:
        return {}
    found = sparsejax.metrics(side.state)
    keys = ("density_before", "density_after", "rounds", "push_imbalance")
    return {key: float(found[f"sync/w/{key}"]) for key in keys}


def wrong(here: host.Here, side: JaxSide, size: int) -> int:
    """Numbers that were lost; all of them where ranks have other bytes.

    After all gradients what was given must be what was applied and is held.
    """
    applied = np.zeros(size)
    for _ in range(STEPS):
        side.run()
        total = side.total()
        digests = here.gather(hashlib.sha256(total.tobytes()).hexdigest())
        if len(set(digests)) > 1:
            return size
        applied += total
    # Held is summed through a file each rank leaves: no collective is trusted here.
    folder = os.environ["CHOOSING_HELD"]
    np.save(os.path.join(folder, f"{here.rank}.npy"), held(side))
    here.gather(0)
    lost = 0
    if here.rank == 0:
        given, scale = np.zeros(size), np.zeros(size)
        for rank in range(here.ranks):
            for x in gradients(size, rank):
                given, scale = given + x, scale + np.abs(x)
            applied += np.load(os.path.join(folder, f"{rank}.npy"))
        lost = int((~(np.abs(given - applied) <= 1e-6 * scale)).sum())
    return here.gather(lost)[0]


def main() -> None:
    settings = json.loads(os.environ["CHOOSING"])
    with host.join() as here:
        host.share_compiled(settings["cache"])
        mesh = Mesh(np.array(jax.devices()), (AXIS,), axis_types=(AxisType.Auto,))
        size = settings["size"]
        own = gradients(size, here.rank)
        compiled, lost = [], {}
        for name, tx in transformations(settings["density"], here.ranks).items():
            if settings["only"] and name not in settings["only"]:
                continue
            one = side(name, tx, size, mesh)
            one.load(*own)
            lost[name] = wrong(here, one, size)
            here.say(f"  {name:16} compiled in {one.compiled:.1f} s, lost {lost[name]}")
            if one.state:
                for _ in range(settings["warm"]):
                    one.run()
            compiled.append(one)
        here.say(f"  {settings['warm']} steps each: what waits has grown")
        for rate in settings["rates"]:
            here.set_rate(rate)
            rows = sides.timed(here, compiled, settings["rounds"])
            for one, row in zip(compiled, rows, strict=True):
                here.report(rate=rate, size=size, wrong=lost[one.name], **told(one), **row)
            here.say(f"  {rate}: timed")


if __name__ == "__main__":
    main()
