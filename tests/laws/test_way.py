"""The way of a gradient is short: CONTRIBUTING.md draws it, and here it is counted."""

import sys
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import pallas_kernels
import sparsejax
from tests import helpers


LIBRARY = Path(sparsejax.__file__).parent
KERNELS = Path(pallas_kernels.__file__).parent


def update():
    """Makes a synchronization, and traces an update of one dense leaf on eight ranks."""
    tx = sparsejax.zen_sync()
    params = {"w": jnp.zeros(1 << 17)}
    step = helpers.shard_map(
        lambda x, state: tx.update({"w": x[0]}, state)[0],
        mesh=helpers.mesh_of(8),
        in_specs=(P("data"), P()),
        out_specs=P(),
    )
    jax.eval_shape(step, jax.ShapeDtypeStruct((8, 1 << 17), jnp.float32), tx.init(params))


def test_a_leaf_passes_few_frames_and_files_to_the_collective(monkeypatch):
    walks = []
    all_to_all = lax.all_to_all

    def counted(*args, **kwargs):
        frames = traceback.extract_stack()
        walks.append([f for f in frames if LIBRARY in Path(f.filename).parents])
        return all_to_all(*args, **kwargs)

    monkeypatch.setattr(lax, "all_to_all", counted)
    update()
    walk = min(walks, key=len)
    assert len(walk) <= 13, [(f.filename, f.name) for f in walk]
    assert len({f.filename for f in walk}) <= 12


def test_an_update_enters_no_more_files_than_it_did():
    """What a reader opens to know what becomes of a gradient: it may only get less."""
    called = set()

    def note(frame, event, argument):
        del argument
        if event == "call":
            called.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        update()
    finally:
        sys.setprofile(before)
    entered = {Path(name) for name in called}
    entered = {path for path in entered if {LIBRARY, KERNELS} & set(path.parents)}
    assert len(entered) <= 52, sorted(str(path) for path in entered)
