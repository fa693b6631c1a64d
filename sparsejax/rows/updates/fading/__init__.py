"""What a row misses while its momentum fades, all at once."""

from sparsejax.rows.updates.fading.fading import (
    Fading,
    Probe,
    Sums,
    decayed,
    in_turn,
    over,
)


__all__ = ["Fading", "Probe", "Sums", "decayed", "in_turn", "over"]
