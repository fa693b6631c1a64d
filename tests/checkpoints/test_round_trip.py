"""A state comes back as it was on as many ranks, and on others keeps what ranks held."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import sparsejax
from sparsejax.checkpoints import reading
from sparsejax.errors import CheckpointError
from sparsejax.state.per_rank import find
from sparsejax.transforms.exchange import ExchangeState
from tests import helpers
from tests.checkpoints import cases


pytest.importorskip("orbax.checkpoint")

LONG = ("lazy rows", "delayed rows")
NAMES = [*(name for name in cases.CASES if name not in LONG), *helpers.slow(*LONG)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a checkpoint of each case, written once."""
    folders = {}

    def folder(name, ranks=cases.RANKS):
        if (name, ranks) not in folders:
            path = tmp_path_factory.mktemp("saved") / f"{name} of {ranks}"
            sparsejax.save(path, cases.filled(name, ranks))
            folders[name, ranks] = path
        return folders[name, ranks]

    return folder


def places(state):
    """Where arrays are; None for those that are nowhere in particular."""
    committed = lambda x: x.sharding if getattr(x, "committed", False) else None
    return [committed(x) for x in jax.tree.leaves(state)]


@pytest.mark.parametrize("name", NAMES)
def test_a_state_comes_back_as_it_was(saved, name, monkeypatch):
    """As bytes, where the fresh one is, and no process has any of it whole."""
    asked = []
    read = reading.read

    def noting(folder, arrays, where):
        asked.extend(where.values())
        return read(folder, arrays, where)

    monkeypatch.setattr(reading, "read", noting)
    like = cases.like(name)
    restored = sparsejax.restore(saved(name), like)
    assert helpers.octets(restored) == helpers.octets(cases.filled(name))
    assert places(restored) == places(like)
    assert jax.tree.structure(restored) == jax.tree.structure(like)
    split = [place for place in asked if place is not None and "data" in place.spec]
    # Parameters that the script has made, on no mesh, follow what they are used with.
    assert sum(place is None for place in asked) <= len(cases.params_of(None))
    assert split or name == "lazy rows"


@pytest.mark.parametrize(("old", "new"), [(cases.RANKS, 4), (4, cases.RANKS)])
@pytest.mark.parametrize("name", NAMES)
def test_on_other_ranks_what_was_held_is_kept(saved, name, old, new):
    state, like = cases.filled(name, old), cases.like(name, new)
    if name == "delayed rows":  # a script makes a table for the ranks that there are
        assert like["params"]["table"].value.shape != state["params"]["table"].value.shape
    restored = sparsejax.restore(saved(name, old), like)
    assert places(restored) == places(like)
    assert jax.tree.structure(restored) == jax.tree.structure(like)

    before, after = cases.held(state), cases.held(restored)
    assert before.keys() == after.keys()
    assert before or name == "lazy rows"
    for path, x in before.items():
        np.testing.assert_allclose(after[path], x, rtol=1e-5, atol=1e-6, err_msg=path)
    if name != "train state":
        assert (restored["epoch"], restored["note"]) == (3, "third")
        for leaf in ("bias", "kernel"):
            np.testing.assert_array_equal(restored["params"][leaf], state["params"][leaf])
    # What schemes have found, thresholds and regions, begins anew.
    of_schemes = lambda state: [x.schemes for x in find(state, ExchangeState)]
    assert helpers.octets(of_schemes(restored)) == helpers.octets(of_schemes(like))
    # By hand: the whole state, and a fresh one.
    part = lambda whole: whole if name == "train state" else whole["opt_state"]
    moved = sparsejax.resized(cases.on_host(part(state)), like=part(like))
    assert helpers.octets(part(restored)) == helpers.octets(moved)


def test_arrays_without_elements_numbers_and_texts(tmp_path):
    mesh = helpers.mesh_of(cases.RANKS)
    there = NamedSharding(mesh, P("data"))
    state = {
        "empty": jax.device_put(np.zeros((2, 0), np.float32), there),
        "nothing": np.zeros((0, 3), np.int8),
        "numpy": np.arange(3, dtype=np.int64),
        "one": np.float32(3),
        "half": jnp.full((2, 2), 1.5, jnp.bfloat16),
        "keys": jax.device_put(jax.random.split(jax.random.key(3, impl="rbg"), 4), there),
        "none": None,
        "true": True,
        "count": 2**70,
        "rate": 0.1,
        "text": "ü\n\0",
        "a/b": {"c": 1},
        "a": {"b/c": 2},
    }
    sparsejax.save(tmp_path / "all", state)
    blank = {
        name: type(x)() if isinstance(x, bool | int | float | str) else x
        for name, x in state.items()
    }
    zero = jax.random.split(jax.random.key(0, impl="rbg"), 4)
    blank |= {
        "numpy": np.zeros(3, np.int64),
        "one": np.float32(0),
        "half": jnp.zeros((2, 2), jnp.bfloat16),
        "keys": jax.device_put(zero, there),
        "a/b": {"c": 0},
    }
    got = sparsejax.restore(tmp_path / "all", blank)
    assert jax.tree.structure(got) == jax.tree.structure(state)
    for name, x in state.items():
        if isinstance(x, jax.Array):
            assert helpers.octets(got[name]) == helpers.octets(x)
            assert got[name].sharding == x.sharding
            assert got[name].committed == x.committed
        else:
            assert type(got[name]) is type(x)
            np.testing.assert_equal(got[name], x)
            assert getattr(got[name], "dtype", None) == getattr(x, "dtype", None)


def test_a_number_may_be_an_array_in_one_and_of_python_in_the_other(tmp_path):
    """As the steps of flax's TrainState, which are an array from the first step on."""
    there = NamedSharding(helpers.mesh_of(cases.RANKS), P())
    arrays = {
        "step": jax.device_put(np.int32(7), there),
        "rate": jnp.float32(0.5),
        "done": np.bool_(True),
    }
    numbers = {"step": 0, "rate": 0.0, "done": False}
    for name, saved, like in (("a", arrays, numbers), ("b", numbers, arrays)):
        sparsejax.save(tmp_path / name, saved)
        got = sparsejax.restore(tmp_path / name, like)
        assert {k: type(x) for k, x in got.items()} == {k: type(x) for k, x in like.items()}
        assert got == saved
    assert got["step"].sharding == there
    for number, place in ((2**40, jnp.int32(0)), (-1, np.uint8(0)), (1e30, np.float16(0))):
        sparsejax.save(tmp_path / f"{number}", {"step": number})
        with pytest.raises(CheckpointError, match="at 'step' it has"):
            sparsejax.restore(tmp_path / f"{number}", {"step": place})
    got = sparsejax.restore(tmp_path / "a", {**numbers, "step": 2**40})
    assert got["step"] == 7  # of which `like` has another value, that is not used
    for other in (np.arange(2), jnp.float32(0), "text"):
        with pytest.raises(CheckpointError, match="at 'step' it has int32"):
            sparsejax.restore(tmp_path / "a", {**numbers, "step": other})


def test_a_target_without_numbers_will_do_on_as_many_ranks(tmp_path):
    mesh = helpers.mesh_of(cases.RANKS)
    state = cases.filled("spardl")["opt_state"]
    sparsejax.save(tmp_path / "state", state)
    tx = cases.TRANSFORMATIONS["spardl"]()
    target = sparsejax.abstract_state(tx, cases.params_of(mesh), mesh)
    restored = sparsejax.restore(tmp_path / "state", target)
    assert helpers.octets(restored) == helpers.octets(state)
    assert places(restored) == [x.sharding for x in jax.tree.leaves(target)]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [cases.RANKS, 4])
def test_rows_that_wait_may_have_more_room_than_in_a_fresh_state(tmp_path, ranks):
    """As in a state that was resized, and saved before its first step."""
    state = cases.filled("delayed rows")["opt_state"]
    pending = state[0].pending["table"]
    ids = np.pad(np.asarray(pending.ids), [(0, 0), (0, 3)], constant_values=60)
    rows = np.pad(np.asarray(pending.rows.value), [(0, 0), (0, 3), (0, 0)])
    place = pending.rows.value.sharding
    pending = dataclasses.replace(
        pending,
        ids=jax.device_put(ids, pending.ids.sharding),
        rows=pending.rows.with_value(jax.device_put(rows, place)),
    )
    state = (state[0]._replace(pending={"table": pending}), *state[1:])
    sparsejax.save(tmp_path / "grown", state)
    like = cases.like("delayed rows", ranks)["opt_state"]
    restored = sparsejax.restore(tmp_path / "grown", like)
    if ranks == cases.RANKS:
        assert helpers.octets(restored) == helpers.octets(state)
    for path, x in cases.held(state).items():
        np.testing.assert_allclose(cases.held(restored)[path], x, rtol=1e-6)


def test_another_axis_of_the_mesh_may_have_other_sizes(tmp_path):
    """Thresholds are by shard; what else there is goes where it belongs."""
    params = {"table": jnp.zeros((8, 40, 2))}
    sparsifier = sparsejax.sparsify(
        sparsejax.sparsifiers.ReuseThreshold(0.1), axis_name="data", min_size=1
    )
    tx = optax.chain(sparsifier, sparsejax.dense_sync("data"), optax.sgd(0.1))

    def made(**sizes):
        mesh = helpers.grid(**sizes)
        specs = {"table": P("model")}
        there = jax.device_put(params, NamedSharding(mesh, specs["table"]))
        return sparsejax.init(tx, there, mesh, "data", param_specs=specs)

    state = made(data=2, model=2)
    state = jax.tree.map(lambda x: x + 2 if x.ndim > 2 else x, state)
    sparsejax.save(tmp_path / "four", state)
    like = made(data=2, model=1)
    restored = sparsejax.restore(tmp_path / "four", like)
    assert places(restored) == places(like)
    held = np.asarray(sparsejax.residuals(restored)["table"])
    assert held.shape == (2, 8, 40, 2)
    np.testing.assert_array_equal(held, 2)
