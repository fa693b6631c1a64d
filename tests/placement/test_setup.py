"""What processes are about to train is compared before anything is sent."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax
from sparsejax.errors import ArgumentError, JobError, RuleError
from sparsejax.jobs import agreement, versions
from sparsejax.placement import flow, program
from tests import helpers
from tests.helpers import jobs


PARAMS = {"table": np.zeros((60, 4), np.float32), "bias": np.zeros(3, np.float32)}


def chain(density=0.1, rate=1e-3, decay=1.0, **options):
    memory = sparsejax.Residual(decay)
    sparsifier = sparsejax.top_k(density, min_size=1, memory=memory)
    return optax.chain(sparsifier, sparsejax.zen_sync(**options), optax.adam(rate))


def inits(*given, mesh=None, **options):
    """Functions, one a process, that each make the state of a pair (tx, params)."""
    mesh = mesh or helpers.mesh_of(2)
    return [
        functools.partial(sparsejax.init, tx, params, mesh, **options)
        for tx, params in given
    ]


@pytest.fixture
def told(monkeypatch):
    """Runs functions as processes all of which have devices of the mesh."""

    def run(functions):
        everyone = tuple(range(len(functions)))
        monkeypatch.setattr(agreement, "processes_of", lambda devices: everyone)
        return jobs.run(monkeypatch, functions)

    return run


def refused(results):
    """The reasons for which all processes refuse, which are the same."""
    for error in results:
        assert isinstance(error, JobError), error
    (text,) = {str(error) for error in results}
    head, *reasons = text.split("\n* ")
    assert head.endswith("the processes of this job are not about to train the same:")
    return reasons


def test_processes_that_agree_make_their_states(told):
    results = told(inits((chain(), PARAMS), (chain(), PARAMS)))
    shapes = [[x.shape for x in jax.tree.leaves(state)] for state in results]
    assert shapes[0] == shapes[1]
    assert len(shapes[0]) > 5


OTHER = {
    "shape": (
        (chain(), PARAMS | {"bias": np.zeros(4, np.float32)}),
        r"the parameter 'bias' is float32\[3\] on host .*process 0.*, and float32\[4\] on",
    ),
    "dtype": (
        (chain(), PARAMS | {"bias": np.zeros(3, jnp.bfloat16)}),
        r"'bias' is float32\[3\] on host .*, and bfloat16\[3\] on host .*process 1",
    ),
    "path": (
        (chain(), {"table": PARAMS["table"], "shift": PARAMS["bias"]}),
        r"'bias' is float32\[3\] on host .*, and absent on host .*process 1",
    ),
    "density": (
        (chain(density=0.2), PARAMS),
        r"the sparsifier is .*density=0\.1.* on host .*density=0\.2.* on host",
    ),
    "wire dtype": (
        (chain(wire_dtype=jnp.bfloat16), PARAMS),
        r"the synchronization is .*wire_dtype=None.* on host .*bfloat16.* on host",
    ),
    "memory": (
        (chain(decay=0.5), PARAMS),
        r"how residuals are kept is \[Residual\(decay=1.0\)\] on .*decay=0.5.* on host",
    ),
    "rule": (
        (chain(rules={"table": "sparse"}), PARAMS),
        r"the synchronization is .*rules=None.* on host .*'table': 'sparse'.* on host",
    ),
    "every": (
        (sparsejax.accumulate(chain(), every=3), PARAMS),
        r"what is around the synchronization is absent on .*every=3.* on host",
    ),
    "learning rate": (
        (chain(rate=2e-3), PARAMS),
        r"mul to float32\[3\] in the update of tx is .*-0\.001.* on host .*-0\.002.* on",
    ),
}


@pytest.mark.parametrize("name", OTHER)
def test_what_differs_is_named_on_all_processes(told, name):
    other, match = OTHER[name]
    reasons = refused(told(inits((chain(), PARAMS), other)))
    assert any(re.search(match, reason) for reason in reasons), reasons


def rates(first, second):
    """Two rates for two leaves of one shape."""
    each = {"a": optax.sgd(first), "b": optax.sgd(second)}
    return optax.chain(sparsejax.zen_sync(), optax.partition(each, {"w": "a", "v": "b"}))


def in_order(*parts):
    return optax.chain(sparsejax.zen_sync(), *parts)


def held(number):
    """An optimizer with an array inside of a jitted function."""
    rates = np.full(3, number, np.float32)
    of_step = jax.jit(lambda step: jnp.asarray(rates)[jnp.minimum(step, 2)])
    return in_order(optax.sgd(of_step))


def density(steps):
    falling = optax.linear_schedule(0.5, 0.05, steps)
    own = sparsejax.sparsifiers.RandomK(sparsejax.sparsifiers.Schedule(falling, 0.5))
    return optax.chain(sparsejax.sparsify(own, min_size=1), sparsejax.zen_sync())


# The same operations with the same numbers, applied to other leaves or in another order;
# and what is in no operation.
ALIKE = {
    "labels": (rates(0.1, 0.2), rates(0.2, 0.1), "order of operations"),
    "order": (
        in_order(optax.clip(1.0), optax.scale(2.0)),
        in_order(optax.scale(2.0), optax.clip(1.0)),
        "order of operations",
    ),
    "betas": (
        in_order(optax.adam(0.1, b1=0.9, b2=0.99)),
        in_order(optax.adam(0.1, b1=0.99, b2=0.9)),
        "order of operations",
    ),
    "jitted": (held(0.1), held(0.2), r"constants in the update of tx is .*0\.1.*0\.2"),
    "schedule": (density(4), density(8), "the schedule of the sparsifier is of hash"),
}


@pytest.mark.parametrize("name", ALIKE)
def test_what_has_the_same_numbers_is_told_apart(told, name):
    *both, match = ALIKE[name]
    params = {"w": np.zeros((40, 5), np.float32), "v": np.zeros((40, 5), np.float32)}
    reasons = refused(told(inits(*((tx, params) for tx in both))))
    assert any(re.search(match, reason) for reason in reasons), reasons
    same = told(inits(*((both[0], params) for _ in both)))
    assert not any(isinstance(one, Exception) for one in same)


def test_options_of_xla_are_settings_but_for_dumps(monkeypatch):
    """Where one process compiles without FMA, replicas differ in their last bits."""

    def seen(flags):
        monkeypatch.setenv("XLA_FLAGS", flags)
        return versions.settings()

    none, other = seen(""), seen("--xla_cpu_max_isa=AVX")
    assert {k for k in none if none[k] != other[k]} == {"XLA_FLAGS"}
    assert seen("--xla_dump_to=/x --xla_force_host_platform_device_count=8") == none
    assert seen("--xla_b --xla_a=1") == seen("--xla_a=2 --xla_a=1 --xla_b") != none
    with jax.default_matmul_precision("float32"):
        assert seen("") != none


def test_a_mesh_of_another_order_is_refused(told):
    mesh = helpers.mesh_of(2)
    turned = jax.make_mesh((2,), ("data",), devices=mesh.devices[::-1])
    functions = [*inits((chain(), PARAMS)), *inits((chain(), PARAMS), mesh=turned)]
    (reason,) = refused(told(functions))
    assert reason.startswith("the order of devices is 0, 1 on host")


def test_a_process_that_refuses_tells_the_others(told):
    wrong = chain(rules={"no such leaf": "row"})
    results = told(inits((chain(), PARAMS), (wrong, PARAMS), timeout=20.0))
    assert isinstance(results[1], RuleError)
    (reason,) = refused(results[:1])
    assert "(process 1) cannot go on: RuleError: the rule 'no such leaf' matches" in reason


def test_who_does_not_call_init_is_named(told):
    one, _ = inits((chain(), PARAMS), (chain(), PARAMS), timeout=0.3)
    error, _ = told([one, lambda: None])
    assert isinstance(error, JobError)
    assert "process 1 of 2 did not reach sparsejax.init within" in str(error)


def test_bind_and_the_trainer_compare_too(told):
    mesh = helpers.mesh_of(2)
    other = PARAMS | {"bias": np.zeros(4, np.float32)}
    bound = sparsejax.bind(chain(), mesh)
    (reason,) = refused(told([lambda p=p: bound.init(p) for p in (PARAMS, other)]))[:1]
    assert "'bias' is float32[3] on host" in reason

    def trainer(params, key=None, tx=None, **options):
        loss_fn = lambda params, batch, **given: jnp.mean(params["bias"]) * batch.mean()
        made = sparsejax.data_parallel(loss_fn, tx or chain(), mesh, **options)
        return functools.partial(made.init, params, key=key)

    (reason,) = refused(told([trainer(PARAMS), trainer(other)]))[:1]
    assert "'bias' is float32[3] on host" in reason
    key = jax.random.key(0)
    reasons = refused(told([trainer(PARAMS, key), trainer(PARAMS, check_every=5)]))
    assert [reason.split(" on host")[0] for reason in reasons] == [
        "check_every is None",
        "key is key<fry>",
    ]
    late = sparsejax.local_steps(optax.sgd(0.1), every=3, delay=1)
    both = [trainer(PARAMS, tx=late, overlap=overlap) for overlap in (False, True)]
    (reason,) = refused(told(both))
    assert reason.startswith("overlap is False on host ")
    assert "(process 0), and True on host " in reason


def test_numbers_that_follow_from_what_differs_are_left_out(told):
    """Of another shape, or another chain, each operation of the update is another one."""
    head = PARAMS | {"bias": np.zeros(4, np.float32)}
    (reason,) = refused(told(inits((chain(), PARAMS), (chain(), head))))
    assert reason.startswith("the parameter 'bias' is float32[3] on host ")
    other = sparsejax.accumulate(chain(), every=3)
    reasons = refused(told(inits((chain(), PARAMS), (other, PARAMS))))
    assert reasons
    assert not any("in the update of tx" in reason for reason in reasons)
    # Of numbers, those of the operation alone, without the options of a jitted function.
    clipped = [
        (optax.chain(chain(), optax.clip(number)), {"w": PARAMS["bias"]})
        for number in (1.0, 2.0)
    ]
    (reason,) = refused(told(inits(*clipped)))
    name = re.escape("jit to float32[3] in the update of tx is ")
    # In JAX 0.12 other operations of the update are jitted functions, too.
    on = r"[0-9.; ]* on host \S+ \(process {}\)"
    match = rf"{name}-1\.0, 1\.0{on.format(0)}, and -2\.0, 2\.0{on.format(1)}\. Give all "
    assert re.match(match, reason)


def test_nobody_is_asked_where_nothing_is_made_or_the_mesh_is_one_process_own(monkeypatch):
    tx, mesh = chain(), helpers.mesh_of(2)
    traced = lambda: jax.eval_shape(lambda p: sparsejax.init(tx, p, mesh), PARAMS)
    alone = lambda: sparsejax.init(tx, PARAMS, mesh)  # all of its devices are of process 0
    for result in jobs.run(monkeypatch, [alone, lambda: None]):
        assert not isinstance(result, Exception), result
    monkeypatch.setattr(agreement, "processes_of", lambda devices: (0, 1))
    for result in jobs.run(monkeypatch, [traced, lambda: None]):
        assert not isinstance(result, Exception), result


def test_without_a_timeout_nothing_is_compared(told):
    other = PARAMS | {"bias": np.zeros(4, np.float32)}
    functions = inits((chain(), PARAMS), (chain(), other), timeout=None)
    for state in told(functions):
        assert not isinstance(state, Exception), state


def test_processes_wait_for_five_minutes_by_default():
    for function in (sparsejax.init, sparsejax.bind):
        assert inspect.signature(function).parameters["timeout"].default == 300


def test_some_hundred_bytes_a_process_are_compared_while_all_is_the_same(monkeypatch):
    """Hashes, however large the model is."""
    many = {str(at): np.zeros((60, 4), np.float32) for at in range(40)}
    monkeypatch.setattr(agreement, "processes_of", lambda devices: (0, 1))
    told, put = [], jobs.Service.key_value_set
    noting = lambda self, key, text: told.append(text) or put(self, key, text)
    monkeypatch.setattr(jobs.Service, "key_value_set", noting)
    for state in jobs.run(monkeypatch, inits((chain(), many), (chain(), many))):
        assert not isinstance(state, Exception), state
    assert len(told) >= 2
    assert sum(map(len, told)) < 2 * 1000


def test_a_timeout_is_positive():
    with pytest.raises(ArgumentError, match="timeout must be above 0, got 0"):
        sparsejax.init(chain(), PARAMS, helpers.mesh_of(2), timeout=0)


def test_numbers_of_a_program_do_not_depend_on_its_order():
    def one(x):
        return 3.0 * x + jnp.where(x > 1, 0.5, x), jnp.flip(x)

    def turned(x):
        flipped = jnp.flip(x)
        return jnp.where(x > 1, 0.5, x) + 3.0 * x, flipped

    x = jnp.ones(4)
    first, second = (program.numbers_of(jax.make_jaxpr(f)(x)) for f in (one, turned))
    assert first == second
    assert first["mul to float32[4]"] == "3.0"
    assert first["add to float32[4]"] == "no constant"
    cubed = program.numbers_of(jax.make_jaxpr(lambda x: jnp.clip(x, 1, 2) ** 3)(x))
    assert cubed["jit to float32[4]"] == "1, 2"
    assert "the options of jit to float32[4]" not in cubed  # its name
    assert cubed["the options of integer_pow to float32[4]"] == "y=3"
    other = program.numbers_of(jax.make_jaxpr(lambda x: one(x * 2.0))(x))
    assert other["mul to float32[4]"] == "2.0; 3.0"
    held = np.arange(3.0, dtype=np.float32)
    constants = program.numbers_of(jax.make_jaxpr(lambda x: x[:3] + jnp.asarray(held))(x))
    assert any("2.0" in text for text in constants.values())


def nested(order, how):
    """A program whose inner one reads four numbers, in some order."""

    def update(x, rates):
        made = {k: jnp.float32(i) + rates[k] for i, k in enumerate("abcd")}

        def inside(x):
            found = {k: x[k] * made[k] for k in order}
            return {k: found[k] for k in "abcd"}

        if how == "cond":
            return jax.lax.cond(rates["a"] > 0, inside, lambda x: x, x)
        if how == "scan":
            return jax.lax.scan(lambda x, _: (inside(x), None), x, None, 3)[0]
        return jax.jit(inside)(x) if how == "jit" else inside(x)

    numbers = dict.fromkeys("abcd", jnp.float32(1))
    return flow.flow_of(jax.make_jaxpr(update)(numbers, numbers))


@pytest.mark.parametrize("how", ["flat", "jit", "cond", "scan"])
def test_the_flow_of_a_program_does_not_depend_on_the_order_of_a_set(how):
    """Which differs by process, and with it the order of what a nested program reads."""
    assert nested("abcd", how) == nested("dbca", how)


@pytest.mark.parametrize("name", ["key", "array"])
def test_a_key_and_an_array_of_many_numbers_are_compared(name):
    """As the seed of a noise, or rates by row: replicas would differ without a word."""
    large = lambda seed: np.full(5000, seed, np.float32)
    made, of = {
        "key": (jax.random.key, r"key<fry>\[\] \[0, 1\]"),
        "array": (large, r"float32\[5000\] of hash [0-9a-f]{16}"),
    }[name]

    def text(seed):
        held = made(seed)
        more = lambda: jax.random.normal(held) if name == "key" else jnp.asarray(held)[:4]
        given = jax.make_jaxpr(lambda x: x + more())(jnp.ones(4))
        return program.numbers_of(given)["constants"]

    first = text(1)
    assert re.fullmatch(of, first)
    assert text(2) != first == text(1)
