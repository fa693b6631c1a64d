"""The errors of the kernels. Each message names the argument, the value and the fix."""


class KernelError(Exception):
    """The base of all errors that the kernels raise on purpose.

    Example:
        >>> issubclass(pallas_kernels.BackendError, pallas_kernels.KernelError)
        True
    """


class KernelArgumentError(KernelError, ValueError):
    """An argument has a value that no kernel can take.

    Example:
        >>> pallas_kernels.compact(jnp.ones(8), capacity=-1)
        Traceback (most recent call last):
        pallas_kernels.errors.KernelArgumentError: ...
    """


class BackendError(KernelError, RuntimeError):
    """The backend that was asked for cannot run here.

    Example:
        >>> pallas_kernels.compact(jnp.ones(8), 4, backend="triton")  # without a GPU
        Traceback (most recent call last):
        pallas_kernels.errors.BackendError: ...
    """
