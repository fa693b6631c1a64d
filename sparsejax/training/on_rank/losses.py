"""Calls loss functions, and checks their outputs."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from sparsejax.errors import ArgumentError


_EXAMPLES = {
    "ids": "lambda batch: {'embedding': batch['ids']}",
    "weight": "lambda batch: batch['mask'].sum()",
}


def check_functions(required: dict[str, Any], optional: dict[str, Any]) -> None:
    """Raises if an argument is not a function; optional arguments may be None."""
    given = {name: value for name, value in optional.items() if value is not None}
    for name, value in (required | given).items():
        if not callable(value):
            example = _EXAMPLES.get(name, "lambda params, batch: loss")
            raise ArgumentError(
                f"{name} must be a function, such as {example}, got {value!r}."
            )


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss function with its outputs in one form: (loss, (aux, variables)).

    Attributes:
        function: The user's function.
        name: The name of the argument, for errors.
        has_aux: Whether the function returns auxiliary outputs.
    """

    function: Callable[..., Any]
    name: str
    has_aux: bool

    def __call__(self, params: Any, batch: Any, given: dict[str, Any]) -> tuple[Any, Any]:
        """Calls the function; aux or variables that it does not return are None.

        Args:
            params: The parameters.
            batch: This rank's share of the batch.
            given: The keyword arguments that the state has: see `variables.keywords`.
        """
        self._check_call(params, batch, given)
        loss, rest = self._taken_apart(self.function(params, batch, **given), given)
        if not (hasattr(loss, "dtype") or isinstance(loss, int | float | complex)):
            raise self._wrong(loss, "a scalar loss")
        if jnp.shape(loss):
            raise ArgumentError(
                f"{self.name} must return a scalar loss, the mean over its share of the "
                f"batch, got an array {list(jnp.shape(loss))}: loss.mean()."
            )
        dtype = jnp.result_type(loss)
        if self.name == "loss_fn" and not jnp.issubdtype(dtype, jnp.floating):
            raise ArgumentError(
                f"loss_fn must return a floating loss, of which there is a gradient, got "
                f"{dtype}. A count, or an accuracy, can be an auxiliary output: "
                "has_aux=True, and return (loss, count)."
            )
        return loss, rest

    def _taken_apart(self, out, given):
        """Returns the outputs of the loss function as (loss, (aux, variables))."""
        returns = ["aux"] * self.has_aux + ["variables"] * ("variables" in given)
        if not returns:
            if isinstance(out, tuple):
                raise self._wrong(out, "the loss", "With auxiliary outputs, has_aux=True.")
            return out, (None, None)
        rest = returns[0] if len(returns) == 1 else f"({', '.join(returns)})"
        if not _is_pair(out):
            raise self._wrong(out, f"(loss, {rest})")
        loss, rest = out
        if len(returns) == 1:
            return loss, (rest, None) if self.has_aux else (None, rest)
        if not _is_pair(rest):
            raise self._wrong(rest, "(aux, variables)", what="second value")
        return loss, tuple(rest)

    def _check_call(self, params, batch, given):
        """Raises if the function does not accept its arguments."""
        try:
            signature = inspect.signature(self.function)
        except (TypeError, ValueError):  # a builtin without a signature
            return
        try:
            signature.bind(params, batch, **given)
        except TypeError as error:
            named = ", ".join(["params", "batch", *(f"{name}={name}" for name in given)])
            raise ArgumentError(
                f"{self.name} is called as {self.name}({named}), and does not take that: "
                f"{error}. It is given what the state was made with: trainer.init(params, "
                "variables=..., key=...)."
            ) from None

    def _wrong(self, out, wanted, hint="", what=""):
        kind = f"a tuple of {len(out)}" if isinstance(out, tuple) else type(out).__name__
        subject = f"the {what} of {self.name}" if what else self.name
        return ArgumentError(f"{subject} must return {wanted}, got {kind}. {hint}".rstrip())


def _is_pair(out):
    return isinstance(out, tuple) and len(out) == 2
