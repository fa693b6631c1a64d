"""The rows of an explanation as tables, with the total cost of a step."""

import math
from collections.abc import Iterator, Sequence

from sparsejax.advise.explain.rows import CHOSEN, COMPARED, Row
from sparsejax.advise.table import size, table
from sparsejax.schemes.all_reduce import AllReduce
from sparsejax.schemes.forecast import Network


_DENSE = AllReduce.__name__
_SENT = ["leaves", "unit", "scheme", "density", "after", "room", "rounds", "sends"]
_SENT += ["dense", "pays below", "up to", ""]
_TIMES = [CHOSEN, *(kind.__name__ for kind in COMPARED)]
_MUCH = 0.95  # the share of the time above which a saving is not mentioned


def tables(rows: Sequence[Row], network: Network) -> Iterator[list[str]]:
    """Yields the lines of each part: bytes, times, notes on schemes, and the sums."""
    yield ["What one rank sends in an exchange; room is entries in the longest message:"]
    yield table([_SENT, *map(_sent, rows)], left=(0, 1, 2, 11))
    work = "the work on the device left out"
    if network.exchange_us:
        work += f" but for {network.exchange_us:g} us of each sparse exchange"
    yield [f"Milliseconds on the network, {work}:"]
    yield table([["leaves", *_TIMES], *map(_times, rows)], left=(0,))
    notes = [*_reasons(rows), *_rounded(rows), *_rounds(rows, network.latency_us)]
    notes += _columns(rows)
    if notes:
        yield notes
    yield [*_sums(rows)]


def _sent(row: Row) -> list[str]:
    """Returns a row of the table of bytes."""
    what = f"{row.name} {list(row.shape)}"
    scheme = row.scheme
    if row.taken and not any(kind in row.scheme for kind in row.taken):
        scheme += f": {' or '.join(row.taken)}"
    if row.sparsifier:
        values = f" in {row.values}" if row.values else ""
        scheme = f"{row.sparsifier}{values}, {scheme}"
    return [
        what,
        f"{row.unit}, {row.ids:,} ids" if row.ids else row.unit,
        scheme,
        f"{row.density:.3%}",
        f"{row.density_after:.3%}",
        f"{row.capacity:,}" if row.capacity else "-",
        str(row.rounds),
        size(row.sent_bytes),
        size(row.dense_bytes),
        f"{row.pays_below:.2%}" if row.pays_below else "-",
        f"{row.pays_up_to:.3g} Gbit/s" if 0 < row.pays_up_to < math.inf else "-",
        row.verdict,
    ]


def _times(row: Row) -> list[str]:
    """Returns a row of the table of times."""
    times = [row.milliseconds[name] for name in _TIMES]
    return [row.name, *("-" if t is None else f"{t:.3g}" for t in times)]


def _reasons(rows):
    """Returns sentences on why schemes are used that are not the fastest."""
    return [f"{row.name}: {row.reason}." for row in rows if row.reason]


def _rounded(rows):
    """Yields sentences about rounded values that are not sent in fewer bits."""
    for row in rows:
        if row.values and not row.coded:
            yield (
                f"{row.name}: values are rounded to {row.values}, and travel in no fewer "
                f"bits than others: {row.scheme} sends sums, or all densely. "
                "schemes.AGSparse() sends codes."
            )


def _rounds(rows, latency_us):
    """Yields sentences about exchanges that larger capacities would make faster."""
    for row in rows:
        whole = row.milliseconds[CHOSEN] or 0.0
        if row.roomy is None or row.roomy[0] > _MUCH * whole:
            continue
        waits = row.latencies * latency_us * 1e-3
        best, push, pull = row.roomy
        yield (
            f"{row.name}: in {row.rounds} rounds {row.latencies} messages wait for one "
            f"another, {waits:.3g} of {whole:.3g} ms; it is {best:.3g} ms with "
            f"BalancedParallelism(push_capacity={push}, pull_capacity={pull}, ratio=4), "
            "room for what is expected here."
        )


def _columns(rows):
    """Yields sentences that compare rows of a table with a table sharded by columns."""
    for row in rows:
        if row.columns is None:
            continue
        own, (sent, least) = row.milliseconds[CHOSEN] or 0.0, row.columns
        better = "columns are" if least < own else "rows are"
        yield (
            f"{row.name}: sharded by columns (sparsejax.ColumnTable) a rank would send "
            f"{size(sent)} in {least:.3g} ms, and {size(row.sent_bytes)} in {own:.3g} ms "
            f"by rows: {better} better here. All ranks together read "
            f"{row.density_after / row.density:.3g} times as many different rows as one."
        )


def _sums(rows):
    """Yields a sentence with the bytes and the time of a step, on average."""
    every = sorted({row.every for row in rows})
    sent, dense, sent_ms, dense_ms = (
        sum(value(row) / row.every for row in rows)
        for value in (
            lambda row: row.sent_bytes,
            lambda row: row.dense_bytes,
            lambda row: row.milliseconds[CHOSEN] or 0.0,
            lambda row: row.milliseconds[_DENSE] or 0.0,
        )
    )
    what = "In all a step"
    if every not in ([], [1]):
        steps = " or ".join(str(k) for k in every)
        what = f"An exchange is at every {steps} steps: a step, on average,"
    yield (
        f"{what} sends {size(sent)} in {sent_ms:.3g} ms; densely {size(dense)} in "
        f"{dense_ms:.3g} ms."
    )
