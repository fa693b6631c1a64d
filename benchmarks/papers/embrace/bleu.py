"""BLEU, as Papineni et al. define it (ACL 2002), of a whole corpus with one reference each.

    BLEU = 100 * min(1, exp(1 - r / c)) * exp(mean of log p_1 .. log p_4)

c and r are the words of all candidates and of all references. p_k is the share of the
candidates' runs of k words that are in the reference of the same sentence, each at most as
often as it is there. Where any p_k is zero, BLEU is.
"""

import collections
import math
from collections.abc import Hashable, Sequence


def bleu(
    candidates: Sequence[Sequence[Hashable]],
    references: Sequence[Sequence[Hashable]],
    order: int = 4,
) -> float:
    """The BLEU of translations, from 0 to 100.

    Args:
        candidates: The words of each translation.
        references: The words of the right one.
        order: The longest runs of words that are compared.
    """
    if len(candidates) != len(references):
        raise ValueError(
            f"{len(candidates)} candidates cannot be compared with {len(references)} "
            "references: give one for each."
        )
    length, right = (sum(map(len, texts)) for texts in (candidates, references))
    logs = 0.0
    for size in range(1, order + 1):
        found = total = 0
        for candidate, reference in zip(candidates, references, strict=True):
            own, there = _runs(candidate, size), _runs(reference, size)
            found += (own & there).total()
            total += own.total()
        if not found:
            return 0.0
        logs += math.log(found / total)
    brevity = min(0.0, 1 - right / length)
    return 100 * math.exp(brevity + logs / order)


def _runs(text, size):
    """How often each run of so many words comes in a text."""
    starts = range(len(text) - size + 1)
    return collections.Counter(tuple(text[i : i + size]) for i in starts)
