"""Checks that gradients are local, and that ranks have equal parameters and one plan."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

from sparsejax import axes
from sparsejax.advise.doctor.findings import NOTE, OK, WRONG, Finding
from sparsejax.axes import AxisName
from sparsejax.jobs import store
from sparsejax.placement import initial
from sparsejax.rounds.reading import local
from sparsejax.state import sharded, tree


_LOCAL = (
    "differentiate with respect to sparsejax.local(params), or let sparsejax.data_parallel "
    "make the step"
)


def gradient(
    mesh: Mesh,
    axis_name: AxisName,
    grad_fn: Callable[[Any, Any], Any] | None,
    params: Any,
    batch: Any,
) -> Finding:
    """Checks that gradients are local, not yet summed, before they are synchronized.

    Args:
        mesh: The mesh.
        axis_name: The mesh axis of the ranks.
        grad_fn: A function from the parameters and a rank's share of a batch to the
            gradient, as it is called inside `jax.shard_map`. If None, the finding is a note
            on what `jax.grad` does in this version of JAX.
        params: The parameters.
        batch: A batch of all ranks.
    """
    if grad_fn is None:
        return _of_jax(mesh, axis_name)
    try:
        summed = _summed(mesh, axis_name, grad_fn, params, batch)
    except Exception as error:  # A user's function may raise any type when it is traced.
        text = f"the gradient function cannot be traced: {type(error).__name__}: {error}"
        return Finding("gradient", WRONG, _line(text))
    if summed:
        text = f"{_some(summed)} is summed over {axis_name!r} before it is synchronized:"
        return Finding("gradient", WRONG, text, f"{_LOCAL}.")
    return Finding("gradient", OK, "it is local: each rank has its own.")


def _of_jax(mesh, axis_name):
    """Returns a note on the gradients that `jax.grad` returns in this version of JAX."""

    def loss(w, x):
        return jnp.sum(w * x)

    w, x = np.ones(1, np.float32), np.ones(mesh.size, np.float32)
    plain = _summed(mesh, axis_name, jax.grad(loss), w, x)
    of_local = lambda w, x: jax.grad(loss)(local(w, axis_name), x)
    if _summed(mesh, axis_name, of_local, w, x):
        text = f"JAX {jax.__version__} sums the gradient of sparsejax.local(params):"
        return Finding("gradient", WRONG, text, "use data_parallel, and tell us.")
    text = "jax.grad leaves it local in this JAX."
    if plain:
        text = (
            "in jax.shard_map jax.grad sums what is taken with respect to replicated "
            f"parameters: {_LOCAL}. A synchronization raises where it was summed; with "
            "check_vma=False that cannot be seen."
        )
    fix = "Give doctor the gradient function, grad_fn= (--gradient), to check it."
    return Finding("gradient", NOTE, f"not checked: none was given; {text}", fix)


def _summed(mesh, axis_name, grad_fn, params, batch) -> list[str]:
    """Returns the paths of gradients that do not vary over the axis, by tracing alone."""
    found: list[str] = []
    names = set(axes.axis_names(axis_name))

    def on_rank(params, batch):
        paths, leaves, _ = tree.flatten(
            sharded.apart(grad_fn(params, batch)).rest, "doctor", rows=True
        )
        found.extend(
            path or "it"
            for path, leaf in zip(paths, leaves, strict=True)
            if names - tree.axes_of(leaf)
        )
        return 0

    specs = P(), P(axis_name)
    mapped = initial.on_ranks(on_rank, mesh=mesh, in_specs=specs, out_specs=P())
    jax.eval_shape(mapped, params, batch)
    return found


def parameters(params: Any, hosts: list[str], timeout: float) -> Finding:
    """Checks that all processes, and their devices, have equal bytes of the parameters.

    Args:
        params: The parameters. Arrays that are sharded over processes are left out.
        hosts: The host name of each process.
        timeout: Seconds to wait for the others.
    """
    about = "parameters"
    paths, leaves, _ = tree.flatten(params, "doctor", rows=True)
    named = list(zip(paths, leaves, strict=True))
    known = [(path, leaf) for path, leaf in named if not _is_abstract(leaf)]
    hashes = {path: list(_hashes(leaf)) for path, leaf in known}
    apart = [path for path, its in hashes.items() if len(set(its)) > 1]
    shapes = [f"{path} {list(np.shape(leaf))} {leaf.dtype}" for path, leaf in named]
    own = {"shapes": shapes, "apart": apart, "all": _hash(repr(sorted(hashes.items())))}
    answers = store.of_all("which parameters it has", own, timeout, hosts)
    fix = "Draw them from one seed on every process, or read them from one checkpoint."
    for process, one in enumerate(answers):
        who = f"process {process} on {hosts[process]}"
        if one["shapes"] != answers[0]["shapes"]:
            other = set(one["shapes"]) ^ set(answers[0]["shapes"])
            text = f"{who} has other leaves than process 0: {_some(sorted(other))}."
            return Finding(about, WRONG, text, "Give all processes the same model.")
        if one["apart"]:
            text = f"devices of {who} hold other bytes of {_some(one['apart'])}."
            return Finding(about, WRONG, text, fix)
    if len({one["all"] for one in answers}) > 1:
        each = store.of_all("the hashes of its parameters", hashes, timeout, hosts)
        for process, its in enumerate(each):
            other = [path for path in its if its[path] != each[0].get(path)]
            if other:
                who = f"process {process} on {hosts[process]}"
                text = f"{who} has other bytes of {_some(other)} than process 0."
                return Finding(about, WRONG, text, fix)
    if not known:
        text = "they have shapes and no numbers; the shapes are the same on all processes."
        return Finding(about, NOTE, text)
    sum_ = own["all"][:8]
    if len(answers) == 1 and not any(len(its) > 1 for its in hashes.values()):
        text = "one process has one copy of each: there is nothing to compare."
        return Finding(about, NOTE, text)
    where = (
        f"on {len(answers)} processes"
        if len(answers) > 1
        else "on the devices of one process"
    )
    return Finding(about, OK, f"{len(known)} leaves are equal as bytes {where} ({sum_}).")


def plan(explained: str, hosts: list[str], timeout: float) -> Finding:
    """Checks that all processes would send the same messages.

    Args:
        explained: The forecast of this process as text, or the reason why it has none.
        hosts: The host name of each process.
        timeout: Seconds to wait for the others.
    """
    answers = store.of_all("its plan", _hash(explained), timeout, hosts)
    for process, one in enumerate(answers):
        if one != answers[0]:
            who = f"process {process} on {hosts[process]}"
            text = f"{who} would synchronize in another way than process 0."
            fix = "Give all processes the same optimizer, rules and plan file."
            return Finding("plan", WRONG, text, fix)
    if len(answers) == 1:
        return Finding("plan", OK, "the transformation fits the parameters.")
    return Finding(
        "plan", OK, f"leaves go by the same schemes everywhere ({answers[0][:8]})."
    )


def _is_abstract(leaf):
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _hashes(leaf) -> Iterator[str]:
    """Yields the hash of each copy of a leaf in this process; none if it has only parts."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if not isinstance(leaf, jax.Array):
        yield _hash(np.asarray(leaf))
    elif leaf.sharding.is_fully_replicated:
        for shard in leaf.addressable_shards:
            yield _hash(np.asarray(shard.data))
    elif leaf.is_fully_addressable:
        yield _hash(np.asarray(leaf))


def _hash(x: Any) -> str:
    data = x.encode() if isinstance(x, str) else np.ascontiguousarray(x).tobytes()
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _some(names: list[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more


def _line(text: str, most: int = 300) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[:most] + " ..."
