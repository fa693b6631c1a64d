"""Files with mistakes: each is refused by its name, or is as good as one without."""

import json
import shutil
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import sparsejax
from sparsejax.advise import codec
from sparsejax.checkpoints import records
from sparsejax.errors import ArgumentError, CheckpointError, PlanError
from tests import helpers
from tests.checkpoints.cases import LIKE, STATE
from tests.fuzz import documents


LONGEST = 1500  # characters of a message
# Deep copies, and examples that are drawn again, take long and are no fault.
fuzz = settings(suppress_health_check=list(HealthCheck), max_examples=100)
fuzz_slowly = settings(fuzz, max_examples=30)

PLAN = {
    "format": 1,
    "ranks": 8,
    "leaves": [
        {"path": "a", "shape": [64, 2], "dtype": "bfloat16", "unit": "row", "note": "why",
         "scheme": {"name": "BalancedParallelism", "push_capacity": 5, "ratio": 1.5,
                    "ownership": {"name": "MurmurHash", "seed": 3, "memory": 0.5}}},
        {"path": "b", "shape": [], "dtype": "float32", "unit": "element",
         "scheme": {"name": "TwoLevel",
                    "across": {"name": "SparCML", "wire_dtype": "float16"}}},
        {"path": "c/d", "shape": [4], "dtype": "float32", "unit": "element",
         "scheme": "AllReduce"},
        {"path": "e", "shape": [9, 3], "dtype": "float32", "unit": "row",
         "scheme": {"name": "Zen", "optimum": "auto", "wire_dtype": "bfloat16"}},
    ],
}  # fmt: skip


def reads(load, file, error):
    """What a file holds; None where it is refused, by its name and in a few words."""
    try:
        return load(file)
    except error as refused:
        message = str(refused)
        assert str(file) in message
        assert len(message) < LONGEST
        return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


def is_as_good_as_another(plan):
    return sparsejax.Plan.from_json(plan.to_json()) == plan and str(plan)


# By kind: a file, what reads it, what refuses it, and what holds of what was read.
KINDS = {
    "plan": (PLAN, sparsejax.Plan.load, PlanError, is_as_good_as_another),
    "cost": (
        {"fixed": 1e-4, "by_number": 1e-9},
        sparsejax.advise.CompressionCost.load,
        ArgumentError,
        lambda cost: 0 <= cost.time(10) < np.inf,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_plans_and_measured_costs(folder, kind):
    document, load, error, is_good = KINDS[kind]
    file, taken = folder / f"{kind}.json", []

    @fuzz
    @given(documents.files_like(document))
    def holds(text):
        file.write_bytes(text)
        found = reads(load, file, error)
        taken.append(found is not None)
        assert found is None or is_good(found)

    file.write_text(json.dumps(document))
    assert is_good(load(file))
    holds()
    assert 0 < sum(taken) < len(taken)


@pytest.mark.slow
def test_descriptions_of_checkpoints():
    """Read by themselves: who means harm makes a checksum that fits."""
    parts = {
        "w": {"array": 0, "shape": [2, 3], "dtype": "float32"},
        "key": {"array": 1, "shape": [], "dtype": "key<fry>", "impl": "threefry2x32"},
        "held": {"type": "PerRank", "told": {"of": ["w"]}, "parts": {"a": {"value": 1}}},
        "nothing": {"type": "None", "parts": {}},
    }
    tree = {"type": "dict", "parts": parts}
    document = {"format": records.FORMAT, "sparsejax": "0.1.0", "jax": "0.10.2", "ranks": 4}
    document |= {"mesh": {"data": 4}, "about": {"seed": 1}, "tree": tree}
    taken = []

    @fuzz
    @given(documents.changed(document))
    def holds(given_):
        sealed = records.sealed(given_) if isinstance(given_, dict) else given_
        text = documents.written(sealed)
        read = lambda file: records.read(text, file)
        record = reads(read, "run/2/about/metadata", CheckpointError)
        taken.append(record is not None)

    holds()
    assert 0 < sum(taken) < len(taken)


@pytest.mark.slow
def test_checkpoints(folder):
    """Each file of JSON in one: ours with a checksum that fits, and those of orbax."""
    pytest.importorskip("orbax.checkpoint")
    whole, copy = folder / "whole", folder / "copy"
    sparsejax.save(whole, STATE)
    each = [path for path in sorted(whole.rglob("*")) if path.is_file()]
    texts = {path.relative_to(whole): path.read_bytes() for path in each}
    files = {name: text for name, text in texts.items() if text.startswith(b"{")}
    assert len(files) >= 3
    shutil.copytree(whole, copy)
    for name, text in files.items():
        restores(copy, copy / name, is_ours=name.parts[0] == "about")
        (copy / name).write_bytes(text)


def restores(folder, file, is_ours):
    restore = lambda folder: sparsejax.restore(folder, LIKE)

    @fuzz_slowly
    @given(documents.changed(json.loads(file.read_text())))
    def holds(document):
        if is_ours and isinstance(document, dict):
            document = records.sealed(document)
        file.write_bytes(documents.written(document))
        restored = reads(restore, folder, CheckpointError)
        if restored is not None:
            np.testing.assert_array_equal(restored["w"], STATE["w"])
            assert type(restored["count"]) is int

    holds()


LARGE = 600_000  # characters


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "d" * LARGE},
        {"k" * LARGE: 1},
        {"scheme": {"name": "Zen", "optimum": "w" * LARGE}},
        {"shape": [int("9" * 4000)] * (LARGE // 4000)},
        *helpers.slow({"shape": [2] * (LARGE // 3)}),
    ],
)
def test_large_fields_take_little(folder, change):
    document = json.loads(json.dumps(PLAN))
    document["leaves"][0] |= change
    file = folder / "large.json"
    file.write_text(json.dumps(document))
    start = time.process_time()
    tracemalloc.start()
    try:
        assert reads(sparsejax.Plan.load, file, PlanError) is None
        assert tracemalloc.get_traced_memory()[1] < codec.LARGEST + 40 * LARGE
    finally:
        tracemalloc.stop()
    assert time.process_time() - start < 5
