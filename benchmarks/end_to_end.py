"""Steps a second of the demo's language model on a real network, by how gradients travel.

    python -m benchmarks.end_to_end --hosts 16 --rate 250mbit

The model, the text and the batches are those of `examples.language_model`, one process a
host (Zen, figures 11 and 12; EmbRace, figure 7). All sides train from the same parameters
on the same batches, in turn, a few steps each; losses must agree, and parameters must be
the same bytes on all ranks.
"""

import argparse
import csv
import hashlib
import itertools
import json
import os
import statistics
import sys
import tempfile

from benchmarks.record import Recorder, say
from benchmarks.testbed import host, job
from benchmarks.testbed.__main__ import hosts as testbed


SIDES = ("dense", "agsparse", "zen")
# How far losses of equal training may be apart: sums are taken in another order.
LOSS = 1e-3


def rank() -> None:
    """One host: trains with every side, and reports a row for each."""
    settings = json.loads(os.environ["END_TO_END"])
    with host.join() as here:
        import jax
        import numpy as np
        import optax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

        import sparsejax
        from examples import lm_corpus, lm_model
        from sparsejax import schemes

        host.share_compiled(settings["cache"])
        mesh = Mesh(np.array(jax.devices()), ("data",))
        sharding = NamedSharding(mesh, P("data"))
        corpus = lm_corpus.load()
        words = len(corpus.words)
        sync = {
            "dense": sparsejax.dense_sync(),
            "agsparse": sparsejax.sync(schemes.AGSparse()),
            "zen": sparsejax.zen_sync(),
        }
        trainers, states = {}, {}
        for name in SIDES:
            tx = optax.chain(sync[name], optax.adam(5e-3))
            trainers[name] = sparsejax.data_parallel(lm_model.loss_fn, tx, mesh)
            states[name] = trainers[name].init(lm_model.init(words, settings["width"]))

        def placed(x):
            return jax.make_array_from_callback(x.shape, sharding, lambda at: x[at])

        # The first step of a turn is not timed: it brings the ranks together.
        a_turn = 1 + settings["steps"]
        made = lm_model.batches(corpus.tokens, words, here.ranks)
        batches = [
            jax.tree.map(placed, batch)
            for batch in itertools.islice(made, settings["rounds"] * a_turn + 1)
        ]
        losses = {name: [] for name in SIDES}
        taken = {name: [] for name in SIDES}

        def train(name, some):
            for batch in some:
                states[name], loss = trainers[name].step(states[name], batch)
                losses[name].append(float(loss))

        for name in SIDES:
            train(name, batches[:1])
            here.say(f"  {name} compiled")
        for turn in range(settings["rounds"]):
            first = 1 + turn * a_turn
            for name in SIDES:
                with here.section() as section:
                    train(name, batches[first : first + 1])
                    section.begin()
                    train(name, batches[first + 1 : first + a_turn])
                taken[name].append(section)
        for name in SIDES:
            steps = settings["steps"]
            digest = hashlib.sha256()
            for leaf in jax.tree.leaves(states[name].params):
                digest.update(np.asarray(leaf.addressable_data(0)).tobytes())
            same = len(set(here.gather(digest.hexdigest()))) == 1
            here.report(
                side=name,
                spans=[(s.begun, s.ended) for s in taken[name]],
                cpu=statistics.median(s.cpu / steps for s in taken[name]),
                sent=statistics.median((s.sent or 0) / a_turn for s in taken[name]),
                loss=losses[name][-1],
                replicas_equal=same,
            )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.end_to_end")
    add = parser.add_argument
    add("--hosts", type=int, nargs="+", default=[4, 16])
    add("--rate", default="250mbit")
    add("--width", type=int, default=256, help="of the model's tables (%(default)s)")
    add("--steps", type=int, default=3, help="of each side in a turn (%(default)s)")
    add("--rounds", type=int, default=3, help="turns (%(default)s)")
    options = parser.parse_args(argv)
    record = Recorder(
        " ".join(["python -m benchmarks.end_to_end", *(argv or sys.argv[1:])])
    )
    say(", ".join(f"{key} {value}" for key, value in record.head.items()))
    for hosts in options.hosts:
        rows = _run(hosts, options)
        if rows is None:
            return 1
        dense = statistics.median(rows[0]["seconds"])
        say(f"\n{hosts} hosts, {rows[0]['rate']}, tables of {options.width} columns")
        say(
            f"{'side':10} {'steps/s':>8} {'x dense':>8}"
            f" {'cpu ms':>8} {'MB sent':>8}    loss"
        )
        for row in rows:
            step = statistics.median(row["seconds"])
            say(
                f"{row['side']:10} {1 / step:8.3f} {dense / step:8.2f}"
                f" {1e3 * row['cpu']:8.0f} {row['sent'] / 1e6:8.2f} {row['loss']:7.4f}"
                + ("" if row["replicas_equal"] else "  REPLICAS DIFFER")
                + ("" if row["agrees"] else "  LOSS DIFFERS")
            )
        record.rows += rows
    path = record.write("end-to-end")
    _csv(record.rows, path.with_suffix(".csv"))
    say(f"\nwritten: {path} and .csv")
    return 0 if all(row["replicas_equal"] and row["agrees"] for row in record.rows) else 1


def _run(hosts: int, options) -> list[dict] | None:
    with tempfile.TemporaryDirectory() as cache, testbed(hosts, options.rate) as net:
        settings = {
            "steps": options.steps,
            "rounds": options.rounds,
            "width": options.width,
            "cache": cache,
        }
        environment = {"END_TO_END": json.dumps(settings)}
        command = [sys.executable, "-c", "from benchmarks import end_to_end as e; e.rank()"]
        done = job.run(command, hosts, net, 1800, environment=environment)
        if done.status:
            say(f"failed: {done.why}")
            return None
        rate = options.rate if net else "unshaped"
    rows = []
    for of_ranks in zip(*done.rows, strict=True):
        row = of_ranks[0] | {"hosts": hosts, "rate": rate}
        samples = zip(*(row["spans"] for row in of_ranks), strict=True)
        row["seconds"] = [host.seconds_together(s) / options.steps for s in samples]
        del row["spans"]
        row["agrees"] = abs(row["loss"] - rows[0]["loss"]) <= LOSS if rows else True
        rows.append(row)
    return rows


def _csv(rows: list[dict], path) -> None:
    with path.open("w", newline="") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow(
            ["hosts", "rate", "side", "seconds_a_step", "cpu_s", "bytes", "loss"]
        )
        for row in rows:
            step = statistics.median(row["seconds"])
            numbers = [step, row["cpu"], row["sent"], row["loss"]]
            writer.writerow([row["hosts"], row["rate"], row["side"], *numbers])


if __name__ == "__main__":
    sys.exit(main())
