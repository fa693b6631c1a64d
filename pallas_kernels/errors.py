"""What the kernels raise. Each message names the argument, the value and the fix."""


class KernelError(Exception):
    """The base of all errors that the kernels raise on purpose."""


class KernelArgumentError(KernelError, ValueError):
    """An argument has a value that no kernel can take."""


class BackendError(KernelError, RuntimeError):
    """A backend was asked for by name that cannot run here."""
