"""The errors that the library raises.

Each message names the leaf or argument, what it may be, its value, and the fix. It ends
with the section of `docs/errors.md` about its class.
"""

import re
import warnings
from typing import Any


_SECTION = re.compile(r"\s?See errors\.md#\w+ in sparsejax's docs\.")


class _Documented(Exception):
    """The base of errors and warnings that have a section in `docs/errors.md`.

    `str` appends the section to the message. `args` has the message alone, so that an error
    survives pickling, and `raise ... from` works as usual.
    """

    def __str__(self) -> str:
        # A message may quote another error, whose section is removed.
        text = _SECTION.sub("", super().__str__())
        # A subclass that another module defines has no section: its base's is named.
        name = next(c.__name__ for c in type(self).__mro__ if c.__module__ == __name__)
        gap = "\n" if "\n" in text else " " * bool(text)
        return f"{text}{gap}See errors.md#{name.lower()} in sparsejax's docs."


class SparsejaxError(_Documented):
    """The base of all errors that sparsejax raises on purpose.

    Example:
        >>> try:
        ...     sparsejax.zen_sync(reduce="max")
        ... except sparsejax.errors.SparsejaxError as error:
        ...     print(error)
        reduce must be 'sum' or 'mean', got 'max'. See errors.md#argumenterror in ...
    """


class ArgumentError(SparsejaxError, ValueError):
    """An argument has a value that cannot be used.

    Example:
        >>> sparsejax.top_k(density=1.5)
        Traceback (most recent call last):
        sparsejax.errors.ArgumentError: density must lie in (0, 1], got 1.5 ...
    """


class AxisError(SparsejaxError, ValueError):
    """A mesh axis does not exist here, or is not given where there are several.

    Example:
        >>> jax.shard_map(
        ...     lambda x: sparsejax.all_reduce(x, "dta"), mesh=mesh, in_specs=P("data"),
        ...     out_specs=P())(batch)
        Traceback (most recent call last):
        sparsejax.errors.AxisError: ...
    """


class AlreadySummedError(SparsejaxError, ValueError):
    """A gradient was summed over the axis before it was synchronized.

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
    """A rule matches no leaf, has no effect, or has an unknown value.

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
    """A checkpoint cannot be written or read, or is that of another state.

    Example:
        >>> sparsejax.restore("no/such/folder", like=params)
        Traceback (most recent call last):
        sparsejax.errors.CheckpointError: ...
    """


class StateError(SparsejaxError, ValueError):
    """A state is not of the kind that the transformation needs.

    Example:
        >>> tx = sparsejax.accumulate(sparsejax.zen_sync(), every=2)
        >>> jax.shard_map(
        ...     lambda grads: tx.update(grads, ())[0], mesh=mesh, in_specs=P(),
        ...     out_specs=P())(params)
        Traceback (most recent call last):
        sparsejax.errors.StateError: ...
    """


class JobError(SparsejaxError, RuntimeError):
    """The processes of a job do not find each other, or are not consistent.

    Example:
        >>> sparsejax.advise.check_coordinator("localhost:12345", 2, 1)
        Traceback (most recent call last):
        sparsejax.errors.JobError: ...
    """


class ReplicaError(SparsejaxError, RuntimeError):
    """Ranks hold different bits of what should be equal on all of them.

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
        state: The state after the skipped step, to continue from or to save, if
            `trainer.step` raised; else None.

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
    """A state that depends on the ranks was initialized where they are not known.

    Example:
        >>> params = {"w": jnp.zeros(8)}  # on no mesh
        >>> sparsejax.dgc(0.01).init(params)  # use sparsejax.init(tx, params, mesh)
        Traceback (most recent call last):
        sparsejax.errors.NeedsRanks: ...
    """


class DenseGradientWarning(_Documented, UserWarning):
    """The gradient of a table that is read by rows is dense, because it has other uses.

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


class UntoldBatchWarning(_Documented, UserWarning):
    """A step of several processes was given another batch than the announced `next_batch`.

    Delayed rows may then be read one step old: `metrics` counts them.

    Example:
        >>> import warnings
        >>> warnings.simplefilter("error", sparsejax.errors.UntoldBatchWarning)
    """


class PlatformWarning(_Documented, UserWarning):
    """A program is slow on its platform, or does something other than was asked for.

    It is issued once a process for each subject, when the first such program is traced.

    Example:
        >>> import warnings
        >>> warnings.simplefilter("error", sparsejax.errors.PlatformWarning)
    """


# Subjects of the platform warnings that this process has issued.
_said: set[str] = set()


def warn_of_platform(about: str, text: str) -> None:
    """Issues a `PlatformWarning`, once a process for each subject.

    Args:
        about: The subject of the warning.
        text: The message.
    """
    if about not in _said:
        _said.add(about)
        warnings.warn(text, PlatformWarning, stacklevel=3)


def message(error: BaseException) -> str:
    """Returns the message of an error without the section of the docs at its end."""
    return _SECTION.sub("", str(error))


def missing_axis(what: str, name: str, names: tuple[str, ...]) -> AxisError:
    """Returns the error for an axis that a mesh does not have."""
    return AxisError(
        f"{what}: the mesh has no axis {name!r}; it has {names}. Name one of these."
    )


def needs_ranks(why: str) -> NeedsRanks:
    """Returns the error for a state that depends on the ranks but is made without a mesh.

    Args:
        why: Why the state depends on the ranks: a clause that begins the message.
    """
    return NeedsRanks(
        f"{why}, so its state must be made where the ranks are known: call "
        "sparsejax.init(tx, params, mesh) instead of tx.init(params), or put the "
        "parameters on an explicit mesh, as of jax.make_mesh, first. Where something "
        "else calls tx.init, as flax's TrainState.create and nnx.Optimizer do, give it "
        "sparsejax.bind(tx, mesh)."
    )


def wrong_state(name: str, needs: str, state: Any) -> StateError:
    """Returns the error for a scheme or an ownership given another one's state.

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
