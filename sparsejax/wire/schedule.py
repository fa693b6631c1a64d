"""How a stage goes: in rounds, or at once. The choice by platform of all that is sent.

in rounds   On CPUs. A message has the size that the rounds before it have left to send,
and work walks over its entries a tile at a time.
at once     On GPUs, where the host waits for each number that a program looks at. A
stage looks once, all parts are packed and unpacked together, and no loop's
length is data.
"""

from collections.abc import Callable

import jax

from sparsejax.axes import by_platform, is_elsewhere


def at_once() -> bool:
    """Whether a stage takes one choice and sends all at once, and not in rounds."""
    return is_elsewhere()


def on_cpus(x: jax.Array, cpu: Callable, default: Callable) -> jax.Array:
    """One way for messages on CPUs, another elsewhere.

    gloo sends to a rank only when that rank has said that it is ready, and has one
    connection for both ways. In XLA's all-to-all and permute a rank that comes late finds
    the others ready and sends its data; that it is ready itself goes out after them. So
    one way waits for the other.
    """
    return by_platform(x, cpu=cpu, default=default)
