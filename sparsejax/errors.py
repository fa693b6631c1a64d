"""What the library raises. Each message names the leaf or argument, the value, the fix."""


class SparsejaxError(Exception):
    """The base of all errors that sparsejax raises on purpose."""


class ArgumentError(SparsejaxError, ValueError):
    """An argument has a value that cannot be used."""


class AxisError(SparsejaxError, ValueError):
    """There is no such mesh axis here, or more than one to choose from."""


class AlreadySummedError(SparsejaxError, ValueError):
    """A gradient was summed over the axis before it was to be synchronized."""


class LeafError(SparsejaxError, TypeError):
    """A leaf has a type that cannot be synchronized."""


class RuleError(SparsejaxError, ValueError):
    """A rule matches no leaf, or says something unknown."""


class PlanError(SparsejaxError, ValueError):
    """A plan cannot be read, or was made for another model or another number of ranks."""


class StateError(SparsejaxError, ValueError):
    """A state is not the one that the transformation needs here."""
