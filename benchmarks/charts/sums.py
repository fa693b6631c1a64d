"""Charts of one sum: by hosts and rate, by scheme, by density, and without zeros."""

import math

from benchmarks.charts.chart import Chart, Panel, mbit, named, series
from benchmarks.harness import results


RATE = "250mbit"
TIMES = "times as fast as psum"


def sums() -> Chart:
    """Zen against a dense sum, by hosts and by the rate of links."""
    found = results.read("communication-jax0.10.2")
    sets = dict.fromkeys(row["workload"] for row in found.rows)
    hosts = sorted({row["hosts"] for row in found.rows})
    rates = sorted({row["rate"] for row in found.where(workload="lstm")}, key=mbit)
    gain = lambda **of: _gain(found, "zen", **of)
    by_set = [
        series(s, [(n, gain(workload=s, hosts=n, rate=RATE)) for n in hosts]) for s in sets
    ]
    by_rate = [
        series(
            f"{n} hosts",
            [(mbit(r), gain(workload="lstm", hosts=n, rate=r)) for r in rates],
        )
        for n in hosts
    ]
    options = {"value": TIMES, "log": "both", "mark": 1.0}
    return Chart(
        "sums",
        "How many times as fast as lax.psum Zen is, by the number of hosts and by rate",
        (
            Panel(f"by set, {named(RATE)}", tuple(by_set), at="hosts", **options),
            Panel("lstm, by rate", tuple(by_rate), at="Mbit/s of a link", **options),
        ),
        (found,),
        height=3.4,
    )


def schemes() -> Chart:
    """All schemes on recorded and drawn sets."""
    found = results.read("communication-jax0.10.2")
    sets = dict.fromkeys(row["workload"] for row in found.rows)
    panels = []
    for hosts in (4, 16):
        of = {"hosts": hosts, "rate": RATE}
        sides = dict.fromkeys(row["scheme"] for row in found.where(**of))
        # Dense sums of both libraries are the yardstick; psum is 1.
        sides = [side for side in sides if side != "psum"]
        shown = [
            series(s, [(side, _gain(found, side, workload=s, **of)) for side in sides])
            for s in sets
        ]
        panels.append(
            Panel(f"{hosts} hosts", tuple(shown), TIMES, kind="dots", log="value", mark=1.0)
        )
    says = "How many times as fast as lax.psum each scheme is, on 4 and on 16 hosts"
    return Chart("schemes", says, tuple(panels), (found,), height=3.4)


def density() -> Chart:
    """Times and bytes by how many entries there are."""
    timed, counted = results.read("densities-jax0.10.2"), results.read("core-jax0.10.2")
    loads = dict.fromkeys(row["workload"] for row in timed.rows)
    by_time = []
    for side in ("zen", "gloo sparse"):
        for color, hosts in enumerate((2, 4, 16)):
            points = []
            for load in loads:
                of = {"workload": load, "hosts": hosts}
                at = 100 * timed.one(**of, scheme=side)["density"]
                points.append((at, _gain(timed, side, **of)))
            label = f"{side}, {hosts} hosts"
            by_time.append(series(label, points, side != "zen", color))
    # One row is the mean of all others, and has no density.
    rows = [r for r in counted.where(part="bytes", kind="independent") if "density" in r]
    rows.sort(key=lambda row: row["density"])
    of = {
        "all-reduce": lambda row: row["dense"],
        "COO": lambda row: row["coo"],
        "hash bitmap": lambda row: row["hash_bitmap"],
        "sent": lambda row: row["wire"],
        "entropy": lambda row: row["values"] + row["entropy"],
    }
    by_bytes = [
        series(
            name,
            [(100 * row["density"], read(row) / 1e6) for row in rows],
            name != "sent",
        )
        for name, read in of.items()
    ]
    at = {"at": "% of rows or numbers on a rank", "log": "both"}
    return Chart(
        "density",
        "Times of Zen over psum by density, and the bytes that a rank sends",
        (
            Panel(f"time, {named(RATE)}", tuple(by_time), TIMES, mark=1.0, **at),
            Panel("MB that one of eight ranks sends", tuple(by_bytes), "MB", **at),
        ),
        (timed, counted),
        height=3.6,
    )


def no_zeros() -> Chart:
    """What is lost where nothing is zero."""
    found = results.read("overhead-jax0.10.2")
    sizes = {row["workload"]: math.prod(row["shape"]) for row in found.rows}
    labels = {
        "dense": f"{4 * sizes['dense'] >> 20} MiB without a zero",
        "tiny": f"{sizes['tiny']:,} numbers",
    }
    shown = []
    for load, label in labels.items():
        points = []
        for hosts in (1, 2, 16):
            of = {"workload": load, "hosts": hosts}
            dense, ours = (
                results.seconds(found.one(**of, scheme=side)) for side in ("psum", "zen")
            )
            points.append((_hosts(hosts), ours / dense))
        shown.append(series(label, points))
    panel = Panel(
        f"{named(RATE)}", tuple(shown), "time of Zen over psum", kind="bars", mark=1.0
    )
    says = "What Zen takes where nothing is zero, over what psum takes"
    return Chart("no_zeros", says, (panel,), (found,), height=2.1)


def _hosts(number):
    return f"{number} host" + "s" * (number > 1)


def _gain(found, side, **of):
    return results.seconds(found.one(**of, scheme="psum")) / results.seconds(
        found.one(**of, scheme=side)
    )
