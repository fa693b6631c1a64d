"""Schemes as optax transformations.

`sync(scheme)` takes each rank's own gradients and returns their mean over the ranks, equal
on all of them bit for bit, so that any optimizer may follow:

    tx = optax.chain(sparsejax.zen_sync(), optax.adam(1e-3))

It assembles the parts, each of which can also be used alone: an `Exchange`, which sums
leaves bucket by bucket, and `feedback` around it, for schemes that leave something out.
`init` may run anywhere unless a state differs by rank (a residual, tables); then it needs
to know the ranks, and `sparsejax.init` provides them. `update` runs inside `jax.shard_map`.
"""

import dataclasses
from typing import Any, TypedDict

import jax
import optax

from sparsejax import arguments
from sparsejax.axes import AxisName, check_axis_name
from sparsejax.errors import ArgumentError
from sparsejax.schemes.all_reduce import AllReduce
from sparsejax.schemes.base import LossyScheme, Scheme
from sparsejax.schemes.two_level import TwoLevel
from sparsejax.state.memories import Memory, MomentumCorrection, Residual
from sparsejax.transforms import buckets
from sparsejax.transforms.buckets import Assignment, ByRules, Rules
from sparsejax.transforms.described import described, without
from sparsejax.transforms.exchange import Exchange
from sparsejax.transforms.feedback import feedback


GONE = {
    "every": "write sparsejax.accumulate(tx, every=k) around the chain.",
    "warmup_steps": "write sparsejax.warm_up(tx, steps) around the chain.",
}
_CHAIN = "optax.chain(sparsejax.dgc(0.01), sparsejax.sync(scheme), optax.adam(1e-3))."
_ALONE = {
    "feedback": "write memory=, with the same value.",
    "sparsifier": f"put the sparsifier in front of sync: {_CHAIN}",
}
_RESIDUAL = Residual()


class SystemOptions(TypedDict, total=False):
    """The arguments of `sync` that every system takes, too."""

    reduce: str
    rules: Rules | None
    wire_dtype: jax.typing.DTypeLike | None
    deterministic: bool | None


@described
@without(GONE | _ALONE)
def sync(
    scheme: Scheme | Assignment,
    axis_name: AxisName | None = None,
    *,
    reduce: str = "mean",
    rules: Rules | None = None,
    wire_dtype: jax.typing.DTypeLike | None = None,
    two_level: bool = True,
    deterministic: bool | None = None,
    memory: Memory = _RESIDUAL,
) -> optax.GradientTransformationExtraArgs:
    """Averages gradients over the ranks of a mesh axis, by a scheme.

    With g the gradient of a rank, w its weight (1 unless given), and n the number of ranks:

        mean = sum over ranks of (w g) / sum over ranks of w
        sum  = n mean

    Put it first in a chain. What follows it is given the gradient of the whole batch.
    Clipping after it clips the mean; before it, inside `shard_map`, each rank's gradient.
    `update` must run inside `jax.shard_map`, on gradients that are still local
    (`sparsejax.local`), or under `jit` on an explicit mesh.

    `update` takes two more arguments:

    * `weight=w`, a number that may differ by rank. A rank of weight 0 does not contribute,
      whatever its gradient is. Chains that keep something by rank, a sparsifier, a lossy
      scheme or `accumulate`, refuse weights.
    * `ids={path: ids}`, the rows of a leaf that this rank's batch has read. The gradient of
      that leaf is then not searched for non-zero rows. The ids must include every row whose
      gradient is not zero: others are not sent. They are used for leaves whose unit is the
      row, if gradients are not accumulated.

    A leaf may be `RowGrads`, as `sparsejax.value_and_grad` makes them. Its sum is
    `RowGrads` with the distinct ids that any rank has listed. Its sum is an array if it is
    summed densely: a small table, one that rules send densely, or one of a scheme without
    rows. The state is made from the table itself. Transformations before `sync` must leave
    `RowGrads` unchanged, and those after it must work on rows, as `sparsejax.lazy` does.
    `optax.scale` and the like compute with the ids, too: `sync` calls `RowGrads.check`,
    which finds such ids.

    Args:
        scheme: How leaves of at least 65,536 elements are summed. Smaller leaves join one
            dense psum, unless they are rows and lists take fewer bytes. Or a plan
            (`sparsejax.make_plan`), which has the scheme of every leaf.
        axis_name: The mesh axis of the ranks; the only manual one if None. A pair is
            (outer, inner), such as ("hosts", "devices"): dense sums over the inner axis,
            the scheme over the outer one (`schemes.TwoLevel`).
        reduce: "mean" or "sum", over the ranks.
        rules: A mapping from regular expressions, searched in a leaf's path (written
            a/b/c), to a scheme, "dense", "sparse" (the scheme whatever the size), or the
            unit of the indices, "row" or "element". The first rule that matches holds.
            Without a rule, 2-D leaves with "embedding" in their path use rows.
        wire_dtype: bfloat16 or float16, to send values in fewer bits. Sums are accumulated
            in float32 or wider, sent back in `wire_dtype`, and returned in the leaf's
            dtype. The mean is taken last, so a sum must fit the narrow dtype. No residual
            keeps the rounding errors made here, not even a sparsifier's.
        two_level: Whether a pair of axes is two levels. If False, the sum is over both axes
            as one.
        deterministic: Whether owners add received values in a fixed order, so that each
            run gives the same bits. On CPUs they always do. On GPUs None does so for up to
            32 ranks, and for any number if another mesh axis holds copies of a gradient.
            True always does. False never does: it is faster on many ranks, and is refused
            if there are copies.
        memory: How the part that a lossy scheme left out is added to later gradients:
            `sparsejax.Residual()`, or `sparsejax.MomentumCorrection(0.9)`, which gives all
            leaves a velocity, those that are sent densely, too. The optimizer then has no
            momentum of its own.

    Returns:
        An `optax.GradientTransformationExtraArgs`, which goes before the optimizer.

    Example:
        >>> scheme = sparsejax.schemes.HierarchicalCentralization()
        >>> send = sparsejax.sync(scheme, rules={"w": "dense"})
        >>> tx = optax.chain(send, optax.adam(1e-3))

    See Also:
        `sparsejax.zen_sync`: sync with the scheme Zen, which most models need.
        `sparsejax.dense_sync`: sync with the dense sum.
        `sparsejax.all_reduce`: sums arrays, outside a chain.
        `sparsejax.accumulate`: synchronizes at every k-th step.
        `sparsejax.warm_up`: sums densely in the first steps.
    """
    assignment = _assignment(scheme, rules, wire_dtype)
    hint = ""
    if isinstance(axis_name, Scheme | Assignment):
        hint = "A scheme or a plan is the first argument of sparsejax.sync(scheme)."
    check_axis_name(axis_name, "sparsejax.sync", hint)
    arguments.check_reduce(reduce)
    check_deterministic(deterministic)
    levels = two_level and isinstance(axis_name, tuple) and len(axis_name) == 2
    assignment.check_levels(levels, axis_name)
    if wire_dtype is not None:
        assignment = assignment.map(lambda scheme: narrowed(scheme, wire_dtype))
    if levels:
        assignment = assignment.map(_by_level)
    if not isinstance(memory, Memory):
        raise ArgumentError(
            "memory must be sparsejax.Residual() or sparsejax.MomentumCorrection(0.9), got "
            f"{memory!r}."
        )
    _check_momentum(assignment, memory)
    exchange = Exchange(assignment, axis_name, reduce == "mean", levels, deterministic)
    return feedback(exchange, memory)


def narrowed(scheme: Scheme, wire_dtype: jax.typing.DTypeLike) -> Scheme:
    """Returns the scheme with another wire dtype; with two levels, that across hosts."""
    fields: Any = scheme
    names = {field.name for field in dataclasses.fields(fields)}
    if "wire_dtype" in names:
        return dataclasses.replace(fields, wire_dtype=jax.numpy.dtype(wire_dtype))
    if "across" in names:
        return dataclasses.replace(fields, across=narrowed(fields.across, wire_dtype))
    raise ArgumentError(f"{type(scheme).__name__} has no wire_dtype to set: leave it out.")


def _assignment(scheme, rules, wire_dtype):
    """Returns the assignment that the arguments of `sync` describe."""
    if isinstance(scheme, Assignment):
        if rules is not None or wire_dtype is not None:
            raise ArgumentError(
                "a plan says for every leaf what rules and wire_dtype say: make it with "
                "them (sparsejax.make_plan), or edit it, and pass it alone."
            )
        return scheme
    check_scheme(scheme)
    buckets.check_rules(rules)
    arguments.check_dtype("wire_dtype", wire_dtype)
    return ByRules(scheme, rules)


def _check_momentum(assignment, memory):
    """Raises if momentum correction is given to schemes that cannot use it.

    These are lossless schemes, and with masking those that send a part of every entry.
    """
    if not isinstance(memory, MomentumCorrection):
        return
    used = assignment.schemes()
    if not any(isinstance(scheme, LossyScheme) for scheme in used):
        names = ", ".join(dict.fromkeys(type(scheme).__name__ for scheme in used))
        raise ArgumentError(
            f"memory={memory!r} keeps velocity where a scheme leaves something out, and of "
            f"{names} none does: give the momentum to the optimizer, or the memory to a "
            f"sparsifier, sparsejax.dgc(0.01, memory=sparsejax.{memory!r})."
        )
    for scheme in used if memory.masking else ():
        if isinstance(scheme, LossyScheme) and not scheme.selects:
            raise ArgumentError(
                f"{type(scheme).__name__} sends a part of every entry, so masking would "
                "clear all momentum: use sparsejax.MomentumCorrection("
                f"{memory.momentum}, masking=False), or give the optimizer the "
                "momentum."
            )


def check_deterministic(deterministic: Any) -> None:
    """Raises unless it is True, False or None."""
    if deterministic is not None and not isinstance(deterministic, bool):
        raise ArgumentError(
            f"deterministic must be True, False or None, got {deterministic!r}."
        )


def check_scheme(scheme: Any) -> None:
    """Raises unless it is a scheme."""
    if isinstance(scheme, Scheme):
        return
    hint = ""
    if isinstance(scheme, optax.GradientTransformation):
        given, hint = repr(scheme), f"Transformations are chained: {_CHAIN}"
    elif isinstance(scheme, type) and issubclass(scheme, Scheme):
        given = f"the class {scheme.__name__}"
        hint = f"Make one: sparsejax.schemes.{scheme.__name__}()."
    elif isinstance(scheme, str) and scheme.endswith(".json"):
        given, hint = repr(scheme), f"A plan is read with sparsejax.Plan.load({scheme!r})."
    else:
        given = repr(scheme)
        if isinstance(scheme, str):
            name = {"dense": "AllReduce"}.get(scheme, scheme).lower()
            named = [kind for kind in _kinds(Scheme) if kind.lower() == name]
            hint = "".join(f"That is sparsejax.schemes.{kind}()." for kind in named)
    raise ArgumentError(
        "scheme must be a sparsejax scheme such as sparsejax.schemes.Zen(), got "
        f"{given}. {hint}".rstrip()
    )


def _kinds(of):
    """Yields the names of all concrete schemes of the package."""
    for kind in of.__subclasses__():
        yield from _kinds(kind)
        is_own = kind.__module__.startswith("sparsejax.schemes.")
        if is_own and not kind.__abstractmethods__:
            yield kind.__name__


def _by_level(scheme):
    """Wraps a scheme in `TwoLevel`, unless it is `psum` or wrapped already."""
    return scheme if isinstance(scheme, (AllReduce, TwoLevel)) else TwoLevel(scheme)
