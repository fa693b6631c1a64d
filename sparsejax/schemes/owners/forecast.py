"""What schemes built on `owners` would send: the same steps, reckoned."""

import math

from sparsejax.schemes.forecast import (
    Forecast,
    Load,
    agreeing,
    fullest_part,
    merged,
    sent_bytes,
)
from sparsejax.schemes.owners import push_pull
from sparsejax.units.ownership import Ownership, StripedHash
from sparsejax.wire import collectives, ladder


def forecast(load: Load, ownership: Ownership, options: push_pull.Options) -> Forecast:
    """Reckons what one rank would send for a load."""
    n, width = load.ranks, ownership.width(load.units, load.ranks)
    unit_bytes = load.unit_bytes(options.wire_dtype)
    push = (options.push_code, options.ratio, options.push_capacity)
    pull = (options.pull_code, options.ratio, options.pull_capacity)
    push_steps = ladder.ladder(width, unit_bytes, n, *push)
    pull_steps = ladder.ladder(width, unit_bytes, n, *pull)
    balanced = ownership.balanced
    first, last = load.counts[0], load.counts[-1]
    need = fullest_part(first, n, width, balanced, load.skewness, sets=n)
    pushed, rounds, capacity = sent_bytes(push_steps, need, n - 1)
    dense = load.all_reduce(options.wire_dtype)
    whole = (n - 1) * width * unit_bytes
    if n * width > push_pull.EVEN * load.units + 32 * n:
        size = load.size * unit_bytes // load.numbers
        whole, least = collectives.all_reduce_bytes(size, n), 0
    else:
        least = whole
    if pushed + least >= dense.bytes:
        return dense
    fullest = fullest_part(last, n, width, balanced, load.sum_skewness)
    messages = rounds * (n - 1) + agreeing(n)
    if options.pull == "gather":
        pulled, turns, _ = sent_bytes(pull_steps, fullest, n - 1)
        waits = agreeing(n) + turns * (n - 1)
    elif options.pull == "doubling":
        pulled, waits = 0.0, 0
        double = ladder.ladder(
            -(-load.units // 32) * 32, unit_bytes, 1, options.pull_code, options.ratio
        )
        for held in merged(n)[:-1]:
            part = min(held * fullest, math.ceil(last))
            sent, turns, _ = sent_bytes(double, part, 1)
            pulled, waits = pulled + sent, waits + turns + agreeing(n)
    elif options.pull == "spread":
        shares = StripedHash().width(width, n)
        inner = ladder.ladder(shares, unit_bytes, n, options.pull_code, options.ratio)
        outer = ladder.ladder(n * shares, unit_bytes, n, options.pull_code, options.ratio)
        share = fullest_part(fullest, n, shares, True, 1.0, sets=n)
        even = fullest_part(last, n, n * shares, True, 1.0)
        scattered, turns, _ = sent_bytes(inner, share, n - 1)
        gathered, more, _ = sent_bytes(outer, even, n - 1)
        pulled = scattered + gathered
        waits = 3 * agreeing(n) + (turns + more) * (n - 1)
    else:
        pulled, waits = whole, n - 1
    if pulled >= whole:
        pulled, waits = whole, agreeing(n) + n - 1
    return Forecast(pushed, float(pulled), messages + waits, capacity)
