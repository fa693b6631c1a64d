"""What every scheme and transformation puts on the wire is what it was: golden files.

Cases are traced on simulated ranks, and hardly ever compiled. Their collectives, in program
order, are compared with those of `tests/golden/wire.json`, where a case has one line for
each collective:

    3 x while/cond[1]/all_to_all uint32[4,320] = 5120 bytes, data

is three equal ones after another, in the second branch of a choice inside a loop, each of
one operand of so many bytes on one rank, over the mesh axis `data`. A ppermute says `to
rank + 1` where all ranks send equally far. What is chosen by platform is marked `cpu:` or
`elsewhere:`. All loops are called `while`; functions, casts that only change a type, and
the names that versions of JAX give to one primitive do not show: code may move.

A file that is to change is written again by

    python -m tests.laws.test_golden_wire

and `git diff` shows what goes over the wire from then on. A new case is an entry in CASES.
"""

import collections
import dataclasses
import difflib
import functools
import itertools
import json
import pathlib
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax import schemes, sparsifiers
from tests import helpers


GOLDEN = pathlib.Path(__file__).resolve().parent.parent / "golden"
AGAIN = "If that is meant, write it again: python -m tests.laws.test_golden_wire"

SIZE = 40_064  # four parts of whole words
VECTOR = {"w": ((SIZE,), "float32")}
MATRIX = {"w": ((313, 128), "float32")}
ROWS = {"w_embedding": ((4096, 16), "float32")}
# A leaf of rows, one of elements, and one that joins the dense psum.
MODEL = {
    "embedding": ((8192, 16), "float32"),
    "kernel": ((300, 300), "float32"),
    "bias": ((300,), "float32"),
}
# Without the elements, which take as long again to trace.
SMALL = {path: MODEL[path] for path in ("embedding", "bias")}
SPARSE = {"w": "sparse"}
LEVELS = {"hosts": 4, "devices": 2}


@dataclasses.dataclass(frozen=True)
class Case:
    """A program to trace.

    Attributes:
        tx: The transformation that is given gradients.
        ranks: Ranks by mesh axis, or how many on the one axis "data".
        leaves: The shape and the dtype of each parameter.
        scheme: The scheme that the case is about.
        check_vma: That of `shard_map`.
        capacity: Entries of the leaf "embedding", given as a `SparseTensor`; None if dense.
        listed: Ids of the leaf "embedding", given as `RowGrads`; None if it is no rows.
        ids: How many rows of the leaf "embedding" are named; None if none are.
        sharded: The parameters' specs, where a further axis shards them.
        call: What is called with gradients instead of `tx`.
        loss: What `data_parallel` differentiates, with a batch of 8 numbers a rank.
    """

    tx: optax.GradientTransformation | None = None
    ranks: int | dict[str, int] = 4
    leaves: dict[str, tuple[tuple[int, ...], str]] = dataclasses.field(
        default_factory=lambda: VECTOR
    )
    scheme: schemes.Scheme | None = None
    check_vma: bool = True
    capacity: int | None = None
    listed: int | None = None
    ids: int | None = None
    sharded: dict[str, P] | None = None
    call: Callable | None = None
    loss: Callable | None = None


def of_scheme(scheme, ranks=4, leaves=VECTOR, **options):
    axis_name = tuple(ranks) if isinstance(ranks, dict) else "data"
    tx = sparsejax.sync(scheme, axis_name, rules=SPARSE)
    return Case(tx, ranks, leaves, scheme, **options)


def of_tx(tx, ranks=4, leaves=SMALL, **options):
    return Case(tx, ranks, leaves, **options)


def planned(*chosen, leaves=VECTOR):
    """A plan for leaves, in the form in which it is kept in a file."""
    entries = [
        {"path": path, "shape": list(shape), "dtype": dtype, "unit": unit, "scheme": scheme}
        for (path, (shape, dtype)), (unit, scheme) in zip(
            sorted(leaves.items()), chosen, strict=True
        )
    ]
    text = json.dumps({"format": 1, "ranks": 4, "leaves": entries})
    return sparsejax.Plan.from_json(text)


def owned(name, /, **ownership):
    """A scheme with an ownership that only plans name."""
    given = {"name": name, "ownership": ownership}
    return planned(("element", given)).leaves[0].scheme


def loss_of(params, batch):
    return sum(jnp.sum(x) * jnp.mean(batch) for x in jax.tree.leaves(params))


BF16 = jnp.bfloat16
DENSITY = 0.01

OF_SCHEMES = {
    "all_reduce": of_scheme(schemes.AllReduce()),
    "all_reduce_bf16": of_scheme(schemes.AllReduce(wire_dtype=BF16)),
    "balanced": of_scheme(schemes.BalancedParallelism()),
    "balanced_8": of_scheme(schemes.BalancedParallelism(), 8),
    "balanced_rows": of_scheme(schemes.BalancedParallelism(), leaves=ROWS),
    "balanced_bf16": of_scheme(schemes.BalancedParallelism(wire_dtype=BF16)),
    "balanced_bitmap": of_scheme(
        schemes.BalancedParallelism(push_code="bitmap", pull_code="bitmap")
    ),
    "balanced_capacity": of_scheme(
        schemes.BalancedParallelism(push_capacity=200, pull_capacity=400, ratio=4.0)
    ),
    "balanced_unchecked": of_scheme(schemes.BalancedParallelism(), check_vma=False),
    "balanced_murmur": of_scheme(owned("BalancedParallelism", name="MurmurHash", seed=3)),
    "balanced_algorithm_1": of_scheme(
        owned("BalancedParallelism", name="MurmurHash", seed=3, memory=0.25)
    ),
    "hierarchical": of_scheme(schemes.HierarchicalCentralization()),
    "hierarchical_3": of_scheme(schemes.HierarchicalCentralization(), 3),
    "zen": of_scheme(schemes.Zen()),
    "zen_bytes": of_scheme(schemes.Zen("bytes")),
    "zen_fastest": of_scheme(schemes.Zen("fastest")),
    "ag_sparse": of_scheme(schemes.AGSparse()),
    "ag_sparse_ring": of_scheme(schemes.AGSparse("ring")),
    "ag_sparse_doubling_6": of_scheme(schemes.AGSparse("doubling"), 6),
    "ag_sparse_bruck_5": of_scheme(schemes.AGSparse("bruck"), 5),
    "sparcml": of_scheme(schemes.SparCML()),
    "sparcml_split": of_scheme(schemes.SparCML("ssar_split_all_gather")),
    "sparcml_dense": of_scheme(schemes.SparCML("dsar_split_all_gather")),
    "sparse_ps": of_scheme(schemes.SparsePS()),
    "sparse_ps_broadcast": of_scheme(schemes.SparsePS("broadcast")),
    "omni_reduce": of_scheme(schemes.OmniReduce()),
    "omni_reduce_1": of_scheme(schemes.OmniReduce(block=64, aggregators=1)),
    "two_level": of_scheme(schemes.TwoLevel(schemes.Zen()), LEVELS),
    "two_level_sparcml": of_scheme(schemes.TwoLevel(schemes.SparCML()), LEVELS),
    "ok_topk": of_scheme(schemes.OkTopk(DENSITY)),
    "ok_topk_5": of_scheme(schemes.OkTopk(DENSITY), 5),
    "ok_topk_rotated": of_scheme(schemes.OkTopk(DENSITY, split="rotated", bucket=2)),
    "spar_dl": of_scheme(schemes.SparDL(DENSITY)),
    "spar_dl_6": of_scheme(schemes.SparDL(DENSITY), 6),
    "spar_dl_2_swaps": of_scheme(schemes.SparDL(DENSITY, teams=2, between="swaps")),
    "spar_dl_3_gather_6": of_scheme(schemes.SparDL(DENSITY, teams=3), 6),
    "g_topk_6": of_scheme(schemes.GTopk(DENSITY), 6),
    "power_sgd": of_scheme(schemes.PowerSGD(2), leaves=MATRIX),
}

OF_TRANSFORMATIONS = {
    "zen_sync_1": of_tx(sparsejax.zen_sync("data"), 1),
    "zen_sync_4": of_tx(sparsejax.zen_sync("data"), leaves=MODEL),
    "zen_sync_8": of_tx(sparsejax.zen_sync("data"), 8),
    "zen_sync_bf16_wire": of_tx(sparsejax.zen_sync("data", wire_dtype=BF16)),
    "zen_sync_two_axes": of_tx(sparsejax.zen_sync(("hosts", "devices")), LEVELS),
    "zen_sync_two_axes_as_one": of_tx(
        sparsejax.zen_sync(("hosts", "devices"), two_level=False), LEVELS
    ),
    "zen_sync_rules": of_tx(
        sparsejax.zen_sync(
            "data",
            rules={
                "embedding": schemes.HierarchicalCentralization(),
                "kernel": "dense",
                "bias": "sparse",
            },
        ),
        leaves=MODEL,
    ),
    "zen_sync_ids": of_tx(sparsejax.zen_sync("data"), ids=64),
    "zen_sync_entries": of_tx(sparsejax.zen_sync("data"), capacity=64),
    # Lists to all ranks, to owners and back, and across hosts before inside them.
    "zen_sync_rows_4": of_tx(sparsejax.zen_sync("data"), listed=64),
    "zen_sync_rows_8": of_tx(sparsejax.zen_sync("data"), 8, listed=64),
    "zen_sync_rows_two_axes": of_tx(
        sparsejax.zen_sync(("hosts", "devices")), LEVELS, listed=64
    ),
    "sync_sparse_ps_rows": of_tx(
        sparsejax.sync(schemes.SparsePS(), "data", wire_dtype=BF16), listed=64
    ),
    "zen_sync_every_2": of_tx(sparsejax.accumulate(sparsejax.zen_sync("data"), 2, "data")),
    "zen_sync_warmup": of_tx(sparsejax.warm_up(sparsejax.zen_sync("data"), 3)),
    "dense_sync": of_tx(sparsejax.dense_sync("data")),
    "sync_of_a_plan": of_tx(
        sparsejax.sync(
            planned(
                ("element", "AllReduce"),
                ("row", {"name": "BalancedParallelism", "push_capacity": 100}),
                ("element", {"name": "AGSparse", "gather": "bruck"}),
                leaves=MODEL,
            ),
            "data",
        ),
        leaves=MODEL,
    ),
    "sync_random_k": of_tx(
        optax.chain(
            sparsejax.sparsify(sparsifiers.RandomK(DENSITY)), sparsejax.zen_sync("data")
        )
    ),
    "ok_topk_sync": of_tx(sparsejax.ok_topk_sync(DENSITY, "data")),
    "spardl_sync": of_tx(sparsejax.spardl_sync(DENSITY, "data")),
    "power_sgd_sync": of_tx(sparsejax.transforms.power_sgd_sync(2, "data"), leaves=MODEL),
    "topk_a_sync": of_tx(sparsejax.transforms.topk_a_sync(DENSITY, "data")),
    "topk_dsa_sync": of_tx(sparsejax.transforms.topk_dsa_sync(DENSITY, "data")),
    "gaussian_k_sync": of_tx(sparsejax.transforms.gaussian_k_sync(DENSITY, "data")),
    "dgc_zen_sync": of_tx(optax.chain(sparsejax.dgc(DENSITY), sparsejax.zen_sync("data"))),
    "dgc_with_all_options_zen_sync": of_tx(
        optax.chain(
            sparsejax.dgc(
                DENSITY,
                memory=sparsejax.MomentumCorrection(0.9),
                clip_norm=1.0,
                global_=True,
            ),
            sparsejax.zen_sync("data"),
        )
    ),
    "dgc_model_axis_zen_sync": of_tx(
        optax.chain(
            sparsejax.dgc(DENSITY, axis_name="data", model_axis="model"),
            sparsejax.zen_sync("data"),
        ),
        {"data": 4, "model": 2},
        sharded={"embedding": P(None, "model"), "bias": P()},
    ),
    "data_parallel": of_tx(
        optax.chain(sparsejax.dense_sync(), optax.sgd(0.1)), loss=loss_of
    ),
    "all_reduce_of_entries": of_tx(None, call=sparsejax.all_reduce, capacity=64),
    "profile": of_tx(None, call=sparsejax.profile),
}


def with_params(tx):
    """A transformation that is given parameters, which a sparsifier may read."""
    ones = lambda grads: jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), grads)
    update = lambda grads, state, params=None: tx.update(grads, state, ones(grads))
    return optax.GradientTransformationExtraArgs(tx.init, update)


# What a sparsifier sends beside its entries, which are counted with a dense sum.
OF_SPARSIFIERS = {
    f"{name}_dense_sync": Case(
        with_params(
            optax.chain(
                sparsejax.sparsify(sparsifier, min_size=1), sparsejax.dense_sync("data")
            )
        )
    )
    for name, sparsifier in {
        "top_k": sparsifiers.TopK(DENSITY),
        "random_k": sparsifiers.RandomK(DENSITY),
        "striding": sparsifiers.Striding(DENSITY),
        "threshold": sparsifiers.Threshold(DENSITY, 0.5),
        "dgc": sparsifiers.DGC(DENSITY),
        "ms_top_k": sparsifiers.MSTopK(DENSITY),
        "gaussian_k": sparsifiers.GaussianK(DENSITY),
        "reuse_threshold": sparsifiers.ReuseThreshold(DENSITY, 32),
        "dragonn": sparsifiers.Dragonn(DENSITY),
        "sign": sparsifiers.Sign(),
        "qsgd": sparsifiers.QSGD(),
        "visible": sparsifiers.Visible(),
    }.items()
}

CASES = OF_SCHEMES | OF_TRANSFORMATIONS | OF_SPARSIFIERS

# What a change would break first; the others are slow tests.
FIRST = [
    "all_reduce",
    "balanced",
    "zen",
    "ag_sparse",
    "sparcml",
    "omni_reduce",
    "zen_sync_rows_8",
    "spar_dl",
    "zen_sync_4",
    "dense_sync",
    "ok_topk_sync",
    "dgc_zen_sync",
    "data_parallel",
]
WITH_METRICS = [
    "zen_sync_4",
    "zen_sync_two_axes",
    "zen_sync_rules",
    "zen_sync_every_2",
    "zen_sync_rows_8",
    "dense_sync",
    "ok_topk_sync",
    "spardl_sync",
    "topk_a_sync",
    "dgc_zen_sync",
    "dgc_with_all_options_zen_sync",
]


def first_and_slow(names):
    rest = [name for name in names if name not in FIRST]
    return [*(name for name in names if name in FIRST), *helpers.slow(*rest)]


# --- Tracing.


def mesh_of(case):
    if isinstance(case.ranks, int):
        return helpers.mesh_of(case.ranks)
    return helpers.grid(**case.ranks)


def gradients_of(case, params, ranks):
    """Abstract gradients, stacked by rank."""
    stacked = lambda shape, dtype: jax.ShapeDtypeStruct((ranks, *shape), dtype)
    grads = {path: stacked(x.shape, x.dtype) for path, x in params.items()}
    entries = {sparsejax.SparseTensor: case.capacity, sparsejax.RowGrads: case.listed}
    for kind, room in entries.items():
        if room is not None:
            shape = params["embedding"].shape
            arrays = stacked((room,), jnp.int32), stacked((room, *shape[1:]), jnp.float32)
            grads["embedding"] = kind(*arrays, shape)
    return grads


@helpers.every_platform()
def traced(case):
    """The jaxpr of a case, and the state after it."""
    mesh = mesh_of(case)
    by_model = P() if case.sharded is None else case.sharded
    data = "data" if case.sharded is not None else mesh.axis_names
    params = {
        path: jax.ShapeDtypeStruct(shape, dtype)
        for path, (shape, dtype) in case.leaves.items()
    }
    ranks = mesh.size if case.sharded is None else mesh.shape["data"]
    if case.loss is not None:
        trainer = sparsejax.data_parallel(case.loss, case.tx, mesh)
        batch = jax.ShapeDtypeStruct((8 * ranks,), jnp.float32)
        # It places what it is given, so abstract parameters will not do.
        state = trainer.init({path: jnp.zeros(x.shape) for path, x in params.items()})
        return jax.make_jaxpr(trainer.compiled(state))(state, batch), state.opt_state
    grads = gradients_of(case, params, ranks)
    grad_specs = P(data)
    if case.sharded is not None:
        grad_specs = {path: P(data, *spec) for path, spec in case.sharded.items()}
    wrap = functools.partial(helpers.shard_map, mesh=mesh, check_vma=case.check_vma)

    def own(grads):
        return jax.tree.map(lambda x: x[0], grads)

    if case.call is not None:
        run = wrap(lambda grads: case.call(own(grads)), in_specs=P(data), out_specs=P())
        return jax.make_jaxpr(run)(grads), None

    start = functools.partial(
        sparsejax.init,
        case.tx,
        mesh=mesh,
        axis_name=data[0] if len(data) == 1 else data,
        param_specs=case.sharded,
        check_vma=case.check_vma,
    )
    state = jax.eval_shape(start, params)
    known = () if case.sharded is None else (params, case.sharded)
    specs = sparsejax.state_specs(state, *known)

    def step(grads, state, extra):
        return case.tx.update(own(grads), state, **own(extra))

    extra = {}
    if case.ids is not None:
        rows = jax.ShapeDtypeStruct((ranks, case.ids), jnp.int32)
        extra = {"ids": {"embedding": rows}}
    run = wrap(step, in_specs=(grad_specs, specs, P(data)), out_specs=(by_model, specs))
    program, (_, state) = jax.make_jaxpr(run, return_shape=True)(grads, state, extra)
    return program, state


def to_whom(pairs, ranks):
    """A permutation in words."""
    steps = {(target - source) % ranks for source, target in pairs}
    if len(pairs) == ranks and len(steps) == 1:
        return f"to rank + {steps.pop()}"
    if len(pairs) == ranks and len({a ^ b for a, b in pairs}) == 1:
        return f"to rank ^ {pairs[0][0] ^ pairs[0][1]}"
    return "to " + " ".join(f"{a}>{b}" for a, b in sorted(pairs))


def line(name, path, eqn, mesh):
    """One collective in words."""
    found = eqn.params.get("axes", eqn.params.get("axis_name"))
    axes = found if isinstance(found, (tuple, list)) else (found,)
    avals = [x.aval for x in eqn.invars]
    operands = [f"{x.dtype}[{','.join(map(str, x.shape))}]" for x in avals]
    size = sum(x.size * x.dtype.itemsize for x in avals)
    words = [f"{' '.join(operands)} = {size} bytes", " ".join(axes)]
    ranks = int(np.prod([mesh.shape[axis] for axis in axes]))
    if eqn.params.get("perm") is not None:
        words.append(to_whom([tuple(map(int, p)) for p in eqn.params["perm"]], ranks))
    if eqn.params.get("axis_index_groups") is not None:
        words.append(f"groups {json.dumps(eqn.params['axis_index_groups'])}")
    return f"{'/'.join([*path, name])} {', '.join(words)}"


def listed(program, mesh):
    """The collectives of a jaxpr, a line each, equal ones after another in one."""
    here, elsewhere = (
        [line(*one, mesh) for one in helpers.collective_equations(program, platform)]
        for platform in ("cpu", "cuda")
    )
    lines = []
    matcher = difflib.SequenceMatcher(None, here, elsewhere, autojunk=False)
    for kind, start, end, other_start, other_end in matcher.get_opcodes():
        if kind == "equal":
            lines += here[start:end]
        else:
            lines += [f"cpu: {text}" for text in here[start:end]]
            lines += [f"elsewhere: {text}" for text in elsewhere[other_start:other_end]]
    runs = [(text, len(list(run))) for text, run in itertools.groupby(lines)]
    return [f"{n} x {text}" if n > 1 else text for text, n in runs]


@functools.cache
def seen(name):
    """The collectives of a case, and the sorted names of its metrics."""
    case = CASES[name]
    program, state = traced(case)
    keys = None if state is None else sorted(jax.eval_shape(sparsejax.metrics, state))
    return listed(program, mesh_of(case)), keys


# --- The golden files.


def read(file):
    return json.loads((GOLDEN / file).read_text(encoding="utf-8"))


def write(file, content):
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    (GOLDEN / file).write_text(text, encoding="utf-8")


def check(name, want, got):
    """Fails with the lines that differ, without a traceback."""
    if want == got:
        return
    lines = list(difflib.unified_diff(want, got, "golden", "now", lineterm="", n=1))
    if collections.Counter(want) == collections.Counter(got):
        lines.append("(The lines are the same, in another order.)")
    pytest.fail("\n".join([f"{name}:", *lines, f"{AGAIN} {name!r}"]), pytrace=False)


@pytest.mark.parametrize("name", first_and_slow(CASES))
def test_the_wire_is_what_it_was(name):
    check(name, read("wire.json").get(name, []), seen(name)[0])


@pytest.mark.parametrize("name", first_and_slow(WITH_METRICS))
def test_the_metrics_have_the_names_that_they_had(name):
    check(name, read("metrics.json").get(name, []), seen(name)[1])


def test_the_files_have_the_cases_of_the_table():
    for file, cases in (("wire.json", list(CASES)), ("metrics.json", WITH_METRICS)):
        other = " ".join(repr(name) for name in sorted({*read(file)} ^ {*cases}))
        assert list(read(file)) == cases, f"{file} has other cases. {AGAIN} {other}"
    assert {*FIRST, *WITH_METRICS} <= set(CASES)


def test_every_public_scheme_and_sparsifier_has_a_case():
    def public(module, base):
        kinds = (x for x in vars(module).values() if isinstance(x, type))
        return {kind for kind in kinds if issubclass(kind, base) and kind is not base}

    used = {type(case.scheme) for case in OF_SCHEMES.values()}
    missing = public(schemes, schemes.Scheme) ^ used
    assert not missing, f"{missing} have no row in OF_SCHEMES, or are not exported"
    named = {kind.__name__ for kind in public(sparsifiers, sparsifiers.Sparsifier)}
    assert len(named) == len(OF_SPARSIFIERS), (
        f"one of {sorted(named)} has no row in OF_SPARSIFIERS"
    )


def main(names):
    """Traces the cases of these names, or all, and writes them; keeps the others."""
    unknown = set(names) - set(CASES)
    if unknown:
        raise SystemExit(f"unknown cases {sorted(unknown)}: they are {', '.join(CASES)}")
    # As in conftest.py.
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    for file, cases, part in (("wire.json", CASES, 0), ("metrics.json", WITH_METRICS, 1)):
        kept = read(file) if names else {}
        again = lambda name, kept=kept: name in names or name not in kept
        write(file, {n: seen(n)[part] if again(n) else kept[n] for n in cases})


if __name__ == "__main__":
    main(sys.argv[1:])
