"""What the collectives of an exchange take by themselves on a network of a given rate.

    python -m benchmarks.messages --hosts 2 4 8 16 --rate 250mbit

No scheme can be faster than its messages. Each collective runs alone, over all hosts of the
testbed, at a few sizes: the maximum of three numbers on which ranks agree, an all-to-all,
the gather around gloo's ring, and the sum of as many bytes as an all-to-all sends; between
two hosts also a permutation, and the swap by a reduce-scatter. The column `link` is what
the bytes take on the link; the rest is gloo, and waking processes.
"""

import argparse
import functools
import json
import os
import statistics
import sys

from benchmarks.record import Recorder, say
from benchmarks.testbed import host, job, network
from benchmarks.testbed.__main__ import hosts as testbed


CALLS, SAMPLES = 5, 3
KILOBYTES = (1, 32, 128, 512)  # of one message


def rank() -> None:
    """One host: reports a row for each collective and size."""
    with host.join() as here:
        import jax
        import numpy as np
        from jax import lax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

        mesh = Mesh(np.array(jax.devices()), ("data",))
        everywhere = NamedSharding(mesh, P("data"))
        n = mesh.size

        def program(function, words):
            x = jax.make_array_from_callback(
                (n * n, words), everywhere, lambda at: np.ones((n, words), np.float32)
            )
            mapped = jax.shard_map(
                function, mesh=mesh, in_specs=P("data"), out_specs=P("data")
            )
            compiled = jax.jit(mapped).lower(x).compile()
            return lambda: jax.block_until_ready(compiled(x))

        def alike(function):
            return lambda x: lax.pcast(function(x), "data", to="varying")

        collectives = {
            "all_to_all": lambda x: lax.all_to_all(x, "data", 0, 0, tiled=True),
            "all_gather": lambda x: lax.all_gather(x[0], "data"),
            "psum": alike(lambda x: lax.psum(x[: n // 2], "data")),
        }
        if n == 2:
            collectives["ppermute"] = lambda x: lax.ppermute(
                x[:1], "data", [(0, 1), (1, 0)]
            )
            scatter = functools.partial(lax.psum_scatter, scatter_dimension=0, tiled=True)
            collectives["psum_scatter"] = lambda x: scatter(x, "data")
        cases = [("pmax", 12, program(alike(lambda x: lax.pmax(x[:1], "data")), 3))]
        cases += [
            (name, 1024 * size, program(function, 256 * size))
            for size in json.loads(os.environ["MESSAGES"])
            for name, function in collectives.items()
        ]
        for name, size, run in cases:
            wanted = n if name.startswith("psum") else 1  # all ranks have ones
            if not (np.asarray(run().addressable_data(0)) == wanted).all():
                raise SystemExit(f"{name} of {size} bytes is wrong")
            samples = [_sample(here, run) for _ in range(SAMPLES)]
            here.report(collective=name, bytes=size, samples=samples)


def _sample(here: host.Here, run) -> dict:
    with here.section() as section:
        run()
        section.begin()
        for _ in range(CALLS):
            run()
    return {
        "span": (section.begun, section.ended),
        "cpu": section.cpu / CALLS,
        "sent": (section.sent or 0) / (CALLS + 1),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.messages")
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--rate", default="250mbit", help="of each link, each way")
    options = parser.parse_args(argv)
    record = Recorder(" ".join(["python -m benchmarks.messages", *(argv or sys.argv[1:])]))
    say(", ".join(f"{key} {value}" for key, value in record.head.items()))
    for hosts in options.hosts:
        with testbed(hosts, options.rate) as net:
            command = [sys.executable, "-c", "from benchmarks.messages import rank; rank()"]
            environment = {"MESSAGES": json.dumps(KILOBYTES)}
            done = job.run(command, hosts, net, 900, environment=environment)
            if done.status:
                say(f"failed: {done.why}")
                return 1
            line = network.bits_per_second(options.rate) / 8 if net else None
        say(f"\n{hosts} hosts")
        say(f"{'collective':12} {'bytes':>8} {'ms':>8} {'link ms':>8} cpu ms")
        for of_ranks in zip(*done.rows, strict=True):
            row = _together(hosts, options.rate if line else "unshaped", of_ranks, line)
            record.rows.append(row)
            link = f"{1e3 * row['link']:8.1f}" if line else "       -"
            say(
                f"{row['collective']:12} {row['bytes']:8} {1e3 * row['seconds']:8.1f}"
                f" {link} {1e3 * row['cpu']:6.2f}"
            )
    say(f"\nwritten: {record.write('messages')}")
    return 0


def _together(hosts, rate, of_ranks, line):
    """One row: the time of all ranks together, the means of the rest."""
    taken = [
        host.seconds_together(row["samples"][i]["span"] for row in of_ranks) / CALLS
        for i in range(SAMPLES)
    ]
    mean = {
        name: statistics.fmean(
            statistics.median(sample[name] for sample in row["samples"]) for row in of_ranks
        )
        for name in ("cpu", "sent")
    }
    return {
        "hosts": hosts,
        "rate": rate,
        "collective": of_ranks[0]["collective"],
        "bytes": of_ranks[0]["bytes"],
        "seconds": statistics.median(taken),
        "link": mean["sent"] / line if line else None,
        **mean,
    }


if __name__ == "__main__":
    sys.exit(main())
