"""Checks of the chain that a wrapper is given."""

from typing import Any

import optax

from sparsejax import errors
from sparsejax.state import observing


def checked(tx: Any, what: str) -> optax.GradientTransformationExtraArgs:
    """Returns the transformation with support for extra arguments, or raises."""
    if not isinstance(tx, optax.GradientTransformation):
        raise errors.ArgumentError(
            f"{what} wraps an optax transformation, such as "
            f"optax.chain(sparsejax.zen_sync(), optax.adam(1e-3)), got {tx!r}."
        )
    if getattr(tx, "stands_alone", False):
        raise errors.ArgumentError(
            f"{what} decides over a whole step, and that of sparsejax.embrace.horizontal "
            f"sends some gradients after others were applied: leave {what} out, or give it "
            "the chain without horizontal."
        )
    return optax.with_extra_args_support(tx)


def require_exchange(tx: Any, params: Any, what: str) -> None:
    """Raises unless the chain has a synchronization."""
    if not observing.observed(tx, params).exchanges:
        raise errors.ArgumentError(
            f"{what} wraps nothing that synchronizes: put the whole chain in it, "
            "optax.chain(sparsejax.zen_sync(), optax.adam(1e-3))."
        )
