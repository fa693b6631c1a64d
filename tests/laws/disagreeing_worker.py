"""One of two processes that train different things, or hold different bits: both are told.

    python -m tests.laws.disagreeing_worker COORDINATOR RANK

Nothing of a parameter's size may go between the two: whatever gathers it is an error here.
At the end process 0 alone calls every function that takes a state, prints "alone", and
waits for no one; process 1 does nothing until its input ends.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P


def main(coordinator, rank):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, 2, rank, initialization_timeout=60)
    import sparsejax
    from sparsejax.errors import ArgumentError, JobError

    mesh = jax.make_mesh((2,), ("data",))
    state_after, fresh = trained(mesh)
    gathered, gather = [], multihost_utils.process_allgather

    def watched(x):
        gathered.append(x.nbytes)
        return gather(x)

    multihost_utils.process_allgather = watched
    multihost_utils.assert_equal = None

    def loss_fn(params, batch, key):
        del key
        return jnp.sum(params["w"] * batch)

    tx = optax.chain(sparsejax.zen_sync(), optax.sgd(0.1))
    trainer = sparsejax.data_parallel(loss_fn, tx, mesh)
    key = jax.random.key(3)
    alike = {
        "half": np.full((3, 1), 0.5, jnp.bfloat16),
        "number": 2.0,
        "w": jax.random.normal(key, (4096, 2)),
    }
    state = trainer.init(alike, key=key)
    for name, x in alike.items():
        got = np.asarray(state.params[name].addressable_data(0))
        assert got.dtype == jnp.result_type(x)
        assert got.tobytes() == np.asarray(x, got.dtype).tobytes(), name
    data = jax.random.key_data(state.key)
    assert np.array_equal(data.addressable_data(0), jax.random.key_data(key))

    other = alike | {"w": alike["w"].at[4000, 1].add(rank)}
    with pytest.raises(ArgumentError, match=r"init: process 1 .* 'params/w' .* one seed"):
        trainer.init(other, key=key)
    with pytest.raises(ArgumentError, match="process 1 has different values of 'key'"):
        trainer.init(alike, key=jax.random.key(rank))
    higher = alike | {"w": np.zeros((4096 + rank, 2))}
    match = r"'w' is float32\[4096, 2\] on host .* float32\[4097, 2\] on host .*process 1"
    with pytest.raises(JobError, match=match):
        trainer.init(higher)
    match = r"'half' is absent on host .*\(process 0\), and bfloat16\[3, 1\] on host"
    with pytest.raises(JobError, match=match):
        trainer.init(alike if rank else {"w": alike["w"]})
    # Copies that processes have made of a global array each for itself.
    copied = NamedSharding(mesh, P())
    own = jax.make_array_from_callback((3,), copied, lambda at: np.full(3, rank)[at])
    with pytest.raises(ArgumentError, match=r"init: process 1 .* 'params/w'"):
        trainer.init({"w": own.astype(np.float32)})
    # As it was restored: every process has all of it.
    restored = jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), state.params)
    changed = restored | {"half": restored["half"] + rank}
    with pytest.raises(ArgumentError, match=r"step: process 1 .* 'params/half'"):
        trainer.step(state._replace(params=changed), np.ones((1, 1), np.float32))
    state, _ = trainer.step(state._replace(params=restored), np.ones((1, 1), np.float32))
    assert len(gathered) == 10
    assert max(gathered) < 500
    # Of shapes that are new to both. Then both go on.
    match = r"float32\[2, 1\] for each rank on .* 0\), and float32\[3, 1\] .*\n.* weight="
    with pytest.raises(ArgumentError, match=match):
        trainer.step(state, np.ones((2 + rank, 1), np.float32))
    state, _ = trainer.step(state, np.ones((1, 1), np.float32))

    finds_other_bits(mesh, state.params, rank)
    refuses_other_setups(mesh, restored, rank)
    assert len(gathered) == 10
    if rank == 0:
        reads_alone(mesh, state_after, fresh)
        print("alone", flush=True)
    sys.stdin.read()


def chain():
    import sparsejax

    own = sparsejax.top_k(0.1, min_size=1), sparsejax.zen_sync(), optax.adam(1e-3)
    return sparsejax.accumulate(optax.chain(*own), every=1)


def trained(mesh):
    """Optimizer states of one step and of none, which both processes make together."""
    import sparsejax

    trainer = sparsejax.data_parallel(lambda p, b: jnp.sum(p["w"] * b), chain(), mesh)
    params = {"w": jnp.ones((4096, 2))}
    share = NamedSharding(mesh, P("data"))
    batch = jax.make_array_from_process_local_data(share, jnp.ones((1, 1)))
    state, _ = trainer.step(trainer.init(params), batch)
    states = state.opt_state, trainer.init(params).opt_state
    return jax.block_until_ready(states)


def reads_alone(mesh, state, fresh):
    """What takes a state: a collective would wait for the other, which does nothing."""
    import sparsejax

    params = {"w": jnp.ones((4096, 2))}
    metrics = sparsejax.metrics(state)
    assert float(metrics["sparsify/residual_norm"]) > 0
    assert all(float(value) == float(value) for value in metrics.values())
    assert "all of 1 exchange" in sparsejax.summary(state)
    jax.tree.leaves(sparsejax.residuals(state))[0].addressable_data(0)
    sparsejax.state_specs(state)
    sparsejax.abstract_state(chain(), params, mesh)
    profiles = sparsejax.advise.profile_from_state(state, params, ranks=2)
    assert all(float(p.counts[0]) >= 0 for p in profiles.values())
    steps = lambda x: 3 if x.shape == () and x.dtype == "int32" else 0
    whole = jax.tree.map(
        lambda x: jnp.full(x.shape, steps(x), x.dtype),
        sparsejax.abstract_state(chain(), params, mesh, ranks=3),
    )
    sparsejax.resized(whole, like=fresh)


def refuses_other_setups(mesh, params, rank):
    """Whatever differs is named on both; nothing is made, and nothing gathered."""
    import sparsejax
    from sparsejax.errors import JobError, RuleError

    def init(tx, params=params, mesh=mesh, **options):
        return sparsejax.init(tx, params, mesh, **options)

    def chain(density=0.1, rate=0.1, **options):
        select = sparsejax.top_k(density, min_size=1)
        return optax.chain(select, sparsejax.zen_sync(**options), optax.adam(rate))

    other = np.full((3, 1), 0.5, np.float32)
    turned = Mesh(mesh.devices[:: 1 - 2 * rank], ("data",), mesh.axis_types)
    for match, make in {
        r"'half' is bfloat16\[3, 1\] on .*0\), and float32\[3, 1\]": lambda: init(
            chain(), params | ({"half": other} if rank else {})
        ),
        r"sparsifier is .*density=0\.1.*0\), and .*density=0\.2": lambda: init(
            chain(0.1 + 0.1 * rank)
        ),
        r"-0\.1.* on host .*-0\.2.* on host": lambda: init(chain(rate=0.1 + 0.1 * rank)),
        r"order of devices is .* on host .*0\), and": lambda: init(chain(), mesh=turned),
    }.items():
        with pytest.raises(JobError, match=match):
            make()
    # What one refuses the other is told.
    tx = chain(rules={"none": "dense"}) if rank else chain()
    kind, match = (RuleError, "none") if rank else (JobError, r"process 1.*RuleError")
    with pytest.raises(kind, match=match):
        init(tx)
    # Orders of sets are each process's own, and no difference.
    names = [f"layer {i}" for i in range(20)]
    tree = {name: np.ones(4, np.float32) for name in {*names}}
    wrapped = sparsejax.skip_nonfinite(sparsejax.accumulate(chain(), 2))
    init(wrapped, tree)
    # A process by itself asks nobody, and who does not come is named: at the end, for
    # behind it the two do not ask the same.
    if rank:
        init(chain(), mesh=jax.make_mesh((1,), ("data",), devices=jax.local_devices()))
    else:
        with pytest.raises(JobError, match=r"process 1 of 2 did not reach .* within 1 s"):
            init(chain(), timeout=1)


def finds_other_bits(mesh, params, rank):
    """A bit that differs is found and told on both; what is the same passes."""
    import sparsejax
    from sparsejax.errors import ArgumentError, ReplicaError

    match = r"leaves differ .*\n.* 'number' is float32\[\] on .* and absent on host"
    with pytest.raises(ArgumentError, match=match):
        sparsejax.check_replicas(
            {k: v for k, v in params.items() if rank == 0 or k != "number"}
        )
    sparsejax.check_replicas(params)
    make = functools.partial(
        jax.make_array_from_single_device_arrays, sharding=NamedSharding(mesh, P())
    )
    w = np.array(params["w"].addressable_data(0))
    w.view(np.uint32)[7, 1] ^= rank
    w = make(w.shape, arrays=[jax.device_put(w, jax.local_devices()[0])])
    match = r"'w': one value on rank 0 \(cpu:\d+, process 0 on host \S+\), and .*process 1"
    with pytest.raises(ReplicaError, match=match):
        sparsejax.check_replicas(params | {"w": w}, step=200, every=100)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
