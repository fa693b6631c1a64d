"""The errors that the library raises, and the checks of arguments that raise them.

Each message names the leaf or argument, what it may be, its value, and the fix.
"""

import math
import numbers
import os
import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp


class SparsejaxError(Exception):
    """The base of all errors that sparsejax raises on purpose.

    Example:
        >>> try:
        ...     sparsejax.zen_sync(reduce="max")
        ... except sparsejax.errors.SparsejaxError as error:
        ...     print(error)
        reduce must be 'sum' or 'mean', got 'max'.
    """


class ArgumentError(SparsejaxError, ValueError):
    """An argument has a value that cannot be used.

    Example:
        >>> sparsejax.top_k(density=1.5)
        Traceback (most recent call last):
        sparsejax.errors.ArgumentError: density must lie in (0, 1], got 1.5 ...
    """


class AxisError(SparsejaxError, ValueError):
    """There is no such mesh axis here, or more than one to choose from.

    Example:
        >>> jax.shard_map(
        ...     lambda x: sparsejax.all_reduce(x, "dta"), mesh=mesh, in_specs=P("data"),
        ...     out_specs=P())(batch)
        Traceback (most recent call last):
        sparsejax.errors.AxisError: ...
    """


class AlreadySummedError(SparsejaxError, ValueError):
    """A gradient was summed over the axis before it was to be synchronized.

    Example:
        >>> tx = sparsejax.dense_sync()
        >>> jax.shard_map(
        ...     lambda grads: tx.update(grads, tx.init(grads))[0], mesh=mesh, in_specs=P(),
        ...     out_specs=P())(params)  # parameters were not made local before the gradient
        Traceback (most recent call last):
        sparsejax.errors.AlreadySummedError: ...
    """


class LeafError(SparsejaxError, TypeError):
    """A leaf has a type that cannot be synchronized.

    Example:
        >>> sparsejax.init(sparsejax.dgc(0.01), {"count": jnp.zeros(3, jnp.int32)}, mesh)
        Traceback (most recent call last):
        sparsejax.errors.LeafError: ...
    """


class RuleError(SparsejaxError, ValueError):
    """A rule matches no leaf, has no effect, or says something unknown.

    Example:
        >>> sparsejax.zen_sync(rules={"no such leaf": "dense"}).init(params)
        Traceback (most recent call last):
        sparsejax.errors.RuleError: ...
    """


class PlanError(SparsejaxError, ValueError):
    """A plan cannot be read, or was made for another model or another number of ranks.

    Example:
        >>> sparsejax.sync(sparsejax.Plan(ranks=8, leaves=())).init(params)
        Traceback (most recent call last):
        sparsejax.errors.PlanError: ...
    """


class CheckpointError(SparsejaxError, ValueError):
    """A checkpoint cannot be written or read, or is of something else.

    Example:
        >>> sparsejax.restore("no/such/folder", like=params)
        Traceback (most recent call last):
        sparsejax.errors.CheckpointError: ...
    """


class StateError(SparsejaxError, ValueError):
    """A state is not the one that the transformation needs here.

    Example:
        >>> tx = sparsejax.accumulate(sparsejax.zen_sync(), every=2)
        >>> jax.shard_map(
        ...     lambda grads: tx.update(grads, ())[0], mesh=mesh, in_specs=P(),
        ...     out_specs=P())(params)
        Traceback (most recent call last):
        sparsejax.errors.StateError: ...
    """


class JobError(SparsejaxError, RuntimeError):
    """The processes of a job do not find each other, or do not fit together.

    Example:
        >>> sparsejax.advise.check_coordinator("localhost:12345", 2, 1)
        Traceback (most recent call last):
        sparsejax.errors.JobError: ...
    """


class ReplicaError(SparsejaxError, RuntimeError):
    """Ranks hold different bits of what should be the same on all of them.

    Example:
        >>> everywhere = jax.sharding.NamedSharding(mesh, P())
        >>> ones = [jnp.ones(3).at[0].add(i == 2) for i in range(4)]  # rank 2 has another
        >>> copies = [jax.device_put(*pair) for pair in zip(ones, mesh.devices.flat)]
        >>> w = jax.make_array_from_single_device_arrays((3,), everywhere, copies)
        >>> sparsejax.check_replicas({"w": w})
        Traceback (most recent call last):
        sparsejax.errors.ReplicaError: replicas are not the same: ...
    """


class BadNumberError(SparsejaxError, FloatingPointError):
    """A gradient, or a sum of gradients, has a number that is not finite.

    Attributes:
        state: The state after the step that was left out, to go on with or to save, where
            `trainer.step` raises; else None.

    Example:
        >>> tx = sparsejax.skip_nonfinite(sparsejax.dense_sync(), report=True)
        >>> state = sparsejax.init(tx, params, mesh)
        >>> specs = sparsejax.state_specs(state)
        >>> infinite = jax.tree.map(lambda x: x / 0, params)
        >>> _, state = jax.shard_map(
        ...     lambda grads, state: tx.update(sparsejax.local(grads), state), mesh=mesh,
        ...     in_specs=(P(), specs), out_specs=(P(), specs))(infinite, state)
        >>> sparsejax.transforms.check_numbers(state)
        Traceback (most recent call last):
        sparsejax.errors.BadNumberError: step 0: the gradient of 'w' has an infinity ...
    """

    state: Any = None


class NeedsRanks(StateError):
    """A state depends on the ranks, and was asked for where they are not known.

    Example:
        >>> sparsejax.dgc(0.01).init(params)  # use sparsejax.init(tx, params, mesh)
        Traceback (most recent call last):
        sparsejax.errors.NeedsRanks: ...
    """

    def __init__(self, why: str):
        super().__init__(
            f"{why}, so its state must be made where the ranks are known: call "
            "sparsejax.init(tx, params, mesh) instead of tx.init(params). Where something "
            "else calls tx.init, as flax's TrainState.create and nnx.Optimizer do, give it "
            "sparsejax.bind(tx, mesh)."
        )


class DenseGradientWarning(UserWarning):
    """The gradient of a table that is read by rows is dense: all of it is used too.

    Example:
        >>> import warnings
        >>> tables = {"words": jnp.ones((1000, 100))}
        >>> tied = lambda p: jnp.sum(p["words"][jnp.array([3])] @ p["words"].T)
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", sparsejax.errors.DenseGradientWarning)
        ...     jax.eval_shape(sparsejax.value_and_grad(tied), tables)
        Traceback (most recent call last):
        sparsejax.errors.DenseGradientWarning: ...
    """


class UntoldBatchWarning(UserWarning):
    """A step of several processes was given another batch than the last one was promised.

    Rows that were held back may then be read one step old: `metrics` counts them.

    Example:
        >>> import warnings
        >>> warnings.simplefilter("error", sparsejax.errors.UntoldBatchWarning)
    """


def cut(text: str, most: int = 80) -> str:
    """A text for a message, its end left out where it is long."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


# --- Checks. Each raises an ArgumentError that names the argument.


def check_static(name: str, value: Any) -> None:
    """Raises for a JAX array, which an injected hyperparameter is."""
    if isinstance(value, jax.Array):
        raise ArgumentError(
            f"{name} must be a Python value, because it decides what is compiled, got a "
            "JAX array. optax.inject_hyperparams injects all numbers that are not in its "
            f"static_args=({name!r},): name all arguments there but those of the optimizer."
        )


def is_int(value: Any, least: float = -math.inf) -> bool:
    """Whether a value is a Python int of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: Any) -> bool:
    """Whether a value is a real number of Python or NumPy, which a float can be."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        float(value)
    except OverflowError:  # an int of some hundred digits
        return False
    return True


def check_whole(name: str, value: Any, least: float = -math.inf, other: str = "") -> None:
    """Raises unless an argument is a Python int of at least `least`.

    Args:
        name: Name of the argument.
        value: Its value.
        least: The smallest int that it may be.
        other: Other values that it may have, for the message: " or None".
    """
    check_static(name, value)
    if not is_int(value, least):
        kind = {-math.inf: "an int", 1: "a positive int"}
        wanted = kind.get(least, f"an int of at least {least}")
        raise ArgumentError(f"{name} must be {wanted}{other}, got {value!r}.")


def wrong_state(name: str, needs: str, state: Any) -> StateError:
    """The error where a scheme or an ownership is given a state that another one made.

    Args:
        name: The name of the scheme or the ownership.
        needs: The state that it needs, in words.
        state: The state that it was given.
    """
    shape = getattr(state, "shape", None)
    given = type(state).__name__ if shape is None else f"an array {list(shape)}"
    return StateError(
        f"{name} needs the state that its init makes, {needs}, got {given}. Make the state "
        "anew with sparsejax.init(tx, params, mesh), or use the scheme that has made it."
    )


def check_path(name: str, path: Any) -> str:
    """The text of a path; raises where no file can have it.

    Args:
        name: Name of the argument.
        path: A text, or a path of `pathlib`.
    """
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise ArgumentError(
            f"{name} must be a text or a pathlib.Path, got {cut(repr(path))}."
        )
    is_utf8 = text.encode(errors="replace").decode() == text
    if not text or "\0" in text or not is_utf8:
        raise ArgumentError(
            f"{name} must be the name of a file or folder, some text without NUL that is "
            f"UTF-8, got {cut(repr(text))}."
        )
    return text


def check_regular(pattern: Any) -> None:
    """Raises unless a pattern is a regular expression."""
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise RuleError(f"{pattern!r} is not a regular expression: {error}.") from None


def check_positive(name: str, value: Any, least: float = 0, most: float = math.inf) -> None:
    """Raises unless an argument is a number above `least` and not above `most`."""
    check_static(name, value)
    if not is_number(value) or not least < value <= most:
        upper = "" if most == math.inf else f" and at most {most:g}"
        raise ArgumentError(f"{name} must be above {least:g}{upper}, got {value!r}.")


def check_at_least(name: str, value: Any, least: float = 0) -> None:
    """Raises unless an argument is a finite number of at least `least`."""
    check_static(name, value)
    if not is_number(value) or not least <= value < math.inf:
        raise ArgumentError(f"{name} must be at least {least:g}, got {value!r}.")


def check_between(name: str, value: Any, least: float, most: float, why: str = "") -> None:
    """Raises unless an argument is a number in [least, most].

    Args:
        name: Name of the argument.
        value: Its value.
        least: The least number that it may be.
        most: The largest number that it may be.
        why: A sentence for the message that says what the number does.
    """
    check_static(name, value)
    if not is_number(value) or not least <= value <= most:
        why = f" {why}" if why else ""
        raise ArgumentError(
            f"{name} must lie in [{least:g}, {most:g}], got {value!r}.{why}"
        )


def check_share(name: str, value: Any) -> None:
    """Raises unless an argument is a number in (0, 1]."""
    check_static(name, value)
    if not is_number(value):
        raise ArgumentError(f"{name} must be a number in (0, 1], got {value!r}.")
    if not 0 < value <= 1:
        hint = " (0.01 is one per cent)" if value > 1 else ""
        raise ArgumentError(f"{name} must lie in (0, 1], got {value!r}{hint}.")


def check_density(name: str, value: Any) -> None:
    """Raises unless an argument is a number in (0, 1], or a schedule of such numbers."""
    check_static(name, value)
    if not callable(value):
        check_share(name, value)
        return
    if not isinstance(getattr(value, "largest", None), (int, float)):
        raise ArgumentError(
            f"{name} is a schedule, and room is made for its largest value: use "
            "sparsejax.sparsifiers.Schedule(schedule, largest=0.1), or "
            "sparsejax.sparsifiers.Warmup(density, steps)."
        )
    check_share(f"{name}.largest", getattr(value, "largest"))  # noqa: B009


def check_one_of(name: str, value: Any, choices: Iterable[Any]) -> None:
    """Raises unless an argument is one of the values that it may have."""
    choices = tuple(choices)
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ArgumentError(f"{name} must be one of {listed}, got {value!r}.")


def check_dtype(name: str, value: Any) -> None:
    """Raises unless numbers can travel in this dtype; None is the dtype of the array."""
    if value is None:
        return
    # NumPy makes dtypes of more texts than names, and fails at others in many ways.
    kind = vars(jnp).get(value) if isinstance(value, str) else value
    try:
        dtype = None if isinstance(kind, list | dict | None) else jnp.dtype(kind)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        meant = _DTYPES.get(value) if isinstance(value, str) else None
        raise ArgumentError(
            f"{name} must be a floating dtype of at least 16 bits, such as jnp.bfloat16, "
            f"got {value!r}." + (f" Did you mean {meant!r}?" if meant else "")
        )


# What other libraries call them.
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "fp32": "float32"}
