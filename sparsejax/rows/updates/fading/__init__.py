"""What a row misses while its momentum fades, all at once."""

from sparsejax.rows.updates.fading.fading import (
    SAMPLES,
    Fading,
    FadingSums,
    Probe,
    decayed,
    first_kept,
    in_turn,
    over,
    probe_of,
)


__all__ = [
    "SAMPLES",
    "Fading",
    "FadingSums",
    "Probe",
    "decayed",
    "first_kept",
    "in_turn",
    "over",
    "probe_of",
]
