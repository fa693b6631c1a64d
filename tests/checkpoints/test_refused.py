"""What is no checkpoint, not whole, or of something else is told in one sentence."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax
from sparsejax.checkpoints import reading, records
from sparsejax.errors import ArgumentError, StateError
from tests import helpers
from tests.checkpoints.cases import LIKE, STATE, refused


ocp = pytest.importorskip("orbax.checkpoint")


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "run" / "2"
    sparsejax.save(path, STATE, about={"data": "wiki"})
    return path


@pytest.fixture
def nothing_is_read(monkeypatch):
    def read(*_):
        raise AssertionError("an array was read")

    monkeypatch.setattr(reading, "read", read)


def test_what_a_checkpoint_is_of_can_be_read(tmp_path):
    mesh, params = helpers.mesh_of(2), {"w": jnp.zeros((3, 2))}
    residuals = sparsejax.init(sparsejax.spardl_sync(0.1), params, mesh)
    sparsejax.save(tmp_path / "1", {"params": params, "sync": residuals})
    told = json.loads((tmp_path / "1" / "about" / "metadata").read_text())
    assert told["sparsejax"] == sparsejax.__version__
    assert told["jax"] == jax.__version__
    assert (told["ranks"], told["mesh"]) == (2, {"data": 2})
    assert told["tree"]["type"] == "dict"
    leaf = told["tree"]["parts"]["params"]["parts"]["w"]
    assert (leaf["shape"], leaf["dtype"]) == ([3, 2], "float32")


# --- What is there, and whole.


def test_what_is_no_checkpoint(tmp_path, saved, nothing_is_read):
    restore = lambda path: sparsejax.restore(path, LIKE)
    refused(
        r"no checkpoint in .*/none: there is no such folder", restore, tmp_path / "none"
    )
    (tmp_path / "empty").mkdir()
    refused("/empty is no checkpoint of .*: it has nothing", restore, tmp_path / "empty")
    (tmp_path / "file").touch()
    refused("/file is a file, and a checkpoint is a folder", restore, tmp_path / "file")
    refused(r"holds checkpoints, .* such as .*/run/2\.", restore, tmp_path / "run")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "alone", {"w": STATE["w"]})
    refused("orbax wrote it without sparsejax.save.*abstract_state", restore,
            tmp_path / "alone")  # fmt: skip
    unfinished = tmp_path / "run" / "4.sparsejax-next.orbax-checkpoint-tmp"
    unfinished.mkdir()
    refused("4 was not finished, .*next.orbax-checkpoint-tmp is what was written", restore,
            tmp_path / "run" / "4")  # fmt: skip


def test_a_checkpoint_without_its_arrays_is_incomplete(saved):
    shutil.rmtree(saved / "state")
    refused("is incomplete: it has no folder 'state'", sparsejax.restore, saved, LIKE)


def rewritten(saved, change):
    """The description, edited, with a checksum that fits."""
    file = saved / "about" / "metadata"
    given = json.loads(file.read_text())
    change(given)
    file.write_text(json.dumps(records.sealed(given)))


@pytest.mark.parametrize("known", [records.FORMAT - 1, records.FORMAT + 1])
def test_another_format_names_both_versions(known, saved, nothing_is_read, monkeypatch):
    def other(given):
        given.update(sparsejax="9.9.0", more={})
        del given["tree"]

    rewritten(saved, other)
    monkeypatch.setattr(records, "FORMAT", known)
    match = (
        r"metadata has format 2, written by sparsejax '9\.9\.0'; this is sparsejax .*, "
        rf"which reads format {known}\. .*pip install"
    )
    refused(match, sparsejax.restore, saved, LIKE)


W = ("tree", "parts", "w")


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("ranks",), True),
        (("mesh",), {"data": "3"}),
        (("colour",), 1),
        (("tree",), [1] * 99),
        ((*W, "shape"), "6"),
        ((*W, "array"), 1),
        (("tree", "parts", "v"), {"array": 0, "shape": [1], "dtype": "int8"}),
    ],
)
def test_a_description_that_save_does_not_write_names_the_file(
    saved, nothing_is_read, where, value
):
    """Whatever its checksum says; so does one of which something is missing."""

    def change(given):
        *way, last = where
        for key in way:
            given = given[key]
        given[last] = value

    match = "/run/2/about/metadata is damaged: sparsejax.save does not write what it says"
    rewritten(saved, change)
    refused(match, sparsejax.restore, saved, LIKE)
    rewritten(saved, lambda given: given.pop("mesh"))
    refused(match, sparsejax.restore, saved, LIKE)


def test_what_has_no_format_is_not_ours(saved, nothing_is_read):
    rewritten(saved, lambda given: given.pop("format"))
    refused("has no 'format'", sparsejax.restore, saved, LIKE)


def test_texts_that_are_too_long_or_too_deep(saved, nothing_is_read, monkeypatch):
    file = saved / "about" / "metadata"
    kept = json.loads(file.read_text())
    for depth in (300, 100_000):  # what JSON can read, and what it cannot
        kept["tree"] = "here"
        deep = '{"type": "a", "parts": {"a": ' * depth + '{"value": 1}' + "}}" * depth
        text = json.dumps(kept).replace('"here"', deep)
        if depth == 300:
            text = json.dumps(records.sealed(json.loads(text)))
        file.write_text(text)
        refused("nested too deeply|recursion|is of another", sparsejax.restore, saved, LIKE)
    monkeypatch.setattr(records, "LARGEST", 100)
    refused("has more than 100 bytes", sparsejax.restore, saved, LIKE)
    path = saved.parent / "4"
    refused("reads 100: keep long", sparsejax.save, path, STATE, error=ArgumentError)
    assert not path.exists()


def test_what_the_description_says_of_an_array_is_checked(saved):
    """The description was edited, and the fresh state is like it."""

    def change(given):
        given["tree"]["parts"]["w"]["shape"] = [3, 3]

    rewritten(saved, change)
    like = {"w": np.zeros((3, 3), np.float32), "count": 0}
    match = (
        r"damaged at 'w': it is float32\[2, 3\], and its description says float32\[3, 3\]"
    )
    refused(match, sparsejax.restore, saved, like)
    like["w"] = jax.device_put(like["w"], jax.devices()[0])
    refused(match, sparsejax.restore, saved, like)


# --- What it is of.


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"w": np.zeros((3, 3), np.float32)},
         r"another model, .* at 'w' it has float32\[2, 3\], and .* float32\[3, 3\]"),
        ({"w": np.zeros((2, 3), np.int32)},
         r"at 'w' it has float32\[2, 3\], and `like` has int32\[2, 3\]"),
        ({"v": np.zeros(1)}, r"at 'v' it has nothing, and `like` has float64\[1\]"),
        ({"count": 0.0}, "at 'count' it has int, and `like` has float"),
        ({"count": None}, "another transformation.* at 'count' it has 1, and .* has None"),
        ({"w": {"a": np.zeros(1)}}, r"at 'w' it has float32\[2, 3\], and `like` has dict"),
    ],
)  # fmt: skip
def test_another_model_is_named(saved, nothing_is_read, change, match):
    refused(match, sparsejax.restore, saved, LIKE | change)


def test_a_leaf_that_is_not_there(saved, nothing_is_read):
    refused(r"at 'count' it has 1, and `like` has nothing", sparsejax.restore, saved,
            {"w": LIKE["w"]})  # fmt: skip


def opt_state(tx, ranks=2):
    return sparsejax.init(tx, {"w": jnp.zeros((50, 4))}, helpers.mesh_of(ranks))


SPARSIFIER = sparsejax.top_k(0.1, min_size=1)
TX = optax.chain(SPARSIFIER, sparsejax.dense_sync(), optax.adam(1e-3))
OTHERS = {
    "no memory": (
        optax.chain(
            sparsejax.top_k(0.1, min_size=1, memory=None),
            sparsejax.dense_sync(),
            optax.adam(1e-3),
        ),
        r"at '0/residual' it has PerRank, and `like` has None",
    ),
    "reduce": (
        optax.chain(SPARSIFIER, sparsejax.dense_sync(reduce="sum"), optax.adam(1e-3)),
        r"it has Reduction\(reduce='mean'\), and `like` has Reduction\(reduce='sum'\)",
    ),
    "optimizer": (
        optax.chain(SPARSIFIER, sparsejax.dense_sync(), optax.sgd(1e-3, momentum=0.9)),
        r"at '2/0' it has ScaleByAdamState, and `like` has TraceState",
    ),
    "scheme": (
        optax.chain(
            SPARSIFIER,
            sparsejax.sync(sparsejax.schemes.Zen(), rules={"w": "sparse"}),
            optax.adam(1e-3),
        ),
        r"/schemes/.* it has tuple, and `like` has ZenState",
    ),
    "shorter": (
        optax.chain(SPARSIFIER, sparsejax.dense_sync()),
        r"at '2' it has tuple, and `like` has nothing",
    ),
}


@pytest.fixture(scope="module")
def of_tx(tmp_path_factory):
    path = tmp_path_factory.mktemp("states") / "state"
    sparsejax.save(path, opt_state(TX))
    return path


@pytest.mark.parametrize(
    ("name", "ranks"), [*((name, 2) for name in OTHERS), ("reduce", 4), ("scheme", 4)]
)
def test_another_transformation_is_named(of_tx, nothing_is_read, name, ranks):
    tx, match = OTHERS[name]
    refused(
        f"another transformation, .*{match}.*It was written by sparsejax ",
        sparsejax.restore,
        of_tx,
        opt_state(tx, ranks),
    )


@pytest.mark.parametrize("ranks", [2, 4])
def test_means_of_another_number_of_steps_are_named(tmp_path, nothing_is_read, ranks):
    of = lambda every: sparsejax.accumulate(TX, every)
    sparsejax.save(tmp_path / "state", opt_state(of(4)))
    match = r"at 'period' it has Period\(every=4, .*, and `like` has Period\(every=2, "
    refused(match, sparsejax.restore, tmp_path / "state", opt_state(of(2), ranks))


@pytest.mark.parametrize("ranks", [2, 4])
def test_another_model_on_other_ranks(of_tx, nothing_is_read, ranks):
    like = sparsejax.init(TX, {"w": jnp.zeros((51, 4))}, helpers.mesh_of(ranks))
    match = rf"at '0/residual/value/w' .* \[2, 50, 4\].*, .* \[{ranks}, 51, 4\]"
    sentence = refused(match.replace(" \\[", r".*\["), sparsejax.restore, of_tx, like)
    assert ("of 2 ranks, and here are 4." in sentence) == (ranks == 4)


def test_other_ranks_need_a_state_with_arrays(of_tx, nothing_is_read):
    like = sparsejax.abstract_state(TX, {"w": jnp.zeros((50, 4))}, helpers.mesh_of(4))
    refused(r"of 2 ranks, and `like` of 4: .*sparsejax\.init", sparsejax.restore, of_tx,
            like, error=ArgumentError)  # fmt: skip


def test_another_run_is_named(saved, nothing_is_read):
    restore = lambda about: sparsejax.restore(saved, LIKE, about=about)
    refused("of data it has wiki, and this run has news", restore, {"data": "news"})
    refused(r"run: it has no about\['seed'\], and this run has 1", restore,
            {"data": "wiki", "seed": 1})  # fmt: skip
    refused("of data it has wiki, and this run has none", restore, {})
    for about in (3, {"a": []}, {1: "a"}):
        refused("about must ", restore, about, error=ArgumentError)


def test_what_equals_nothing_says_of_no_run_that_it_is_the_same(tmp_path):
    about = {"seed": 1, "lr": float("nan")}
    refused("about has 'lr': nan, which equals no number", sparsejax.save,
            tmp_path / "1", STATE, about=about, error=ArgumentError)  # fmt: skip
    assert not (tmp_path / "1").exists()
    about = {"most": float("inf"), "least": -float("inf")}
    sparsejax.save(tmp_path / "1", STATE, about=about)
    sparsejax.restore(tmp_path / "1", LIKE, about=about)


def test_the_same_run_is_taken(saved):
    restored = sparsejax.restore(saved, LIKE, about={"data": "wiki"})
    np.testing.assert_array_equal(restored["w"], STATE["w"])


def test_containers_that_do_not_tell_what_ranks_hold(tmp_path, nothing_is_read):
    """As those of flax.nnx."""
    of = lambda ranks: dict(enumerate(jax.tree.leaves(opt_state(TX, ranks))))
    sparsejax.save(tmp_path / "flat", of(2))
    match = "of 2 ranks, and here are 4, and nothing in `like` says .*init.*nnx.as_pure"
    refused(match, sparsejax.restore, tmp_path / "flat", of(4))


def test_a_state_that_is_used_up_is_nothing_to_be_like(saved):
    like = {"w": jnp.zeros((2, 3)), "count": 0}
    like["w"].delete()
    refused("restore was given a state that is used up", sparsejax.restore, saved, like,
            error=StateError)  # fmt: skip
