"""What wrappers check of the chain inside, and of their arguments."""

from typing import Any

import optax

from sparsejax import errors
from sparsejax.state import observing


def checked(tx: Any, what: str) -> optax.GradientTransformationExtraArgs:
    """The transformation, with extra arguments passed on."""
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
    """Raises where nothing inside synchronizes."""
    if not observing.observed(tx, params).exchanges:
        raise errors.ArgumentError(
            f"{what} wraps nothing that synchronizes: put the whole chain in it, "
            "optax.chain(sparsejax.zen_sync(), optax.adam(1e-3))."
        )
