"""Runs a command on hosts of a limited network; see the package's docstring."""

import argparse
import json
import sys

from benchmarks.harness.record import machine
from benchmarks.testbed import job, network


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.testbed",
        description="Runs COMMAND once in each host of a network of a given rate.",
    )
    add = parser.add_argument
    add("--hosts", type=int, help="how many hosts")
    add("--rate", default="250mbit", help="of each host's link, each way (%(default)s)")
    add("--latency", help="of a message, as 2ms; where the kernel has netem")
    add("--timeout", type=float, default=600, help="seconds to the end (%(default)s)")
    add("--out", help="a file for what the ranks report, as JSON lines")
    add("--unshaped", action="store_true", help="over loopback, at no particular rate")
    add("--kill", action="append", default=[], metavar="RANK@SECONDS")
    add("--pause", action="append", default=[], metavar="RANK@SECONDS+PAUSE")
    add("--clean", action="store_true", help="remove what killed testbeds left behind")
    add("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    return parser


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    if options.clean:
        removed = network.left_behind()
        print("\n".join(removed) or "Nothing was left behind.")
        return 0
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not options.hosts or not command:
        parser().error("name --hosts, and the command behind --")
    try:
        faults = [job.Fault.parse(text, pause=False) for text in options.kill]
        faults += [job.Fault.parse(text, pause=True) for text in options.pause]
        rate = None if options.unshaped else options.rate
        with network.hosts(options.hosts, rate, options.latency) as made:
            outcome = job.run(command, options.hosts, made, options.timeout, tuple(faults))
    except ValueError as error:
        parser().error(str(error))
    except network.Cannot as error:
        print(f"testbed: {error}", file=sys.stderr)
        return 2
    _tell(outcome, options)
    return outcome.status


def _tell(outcome: job.Outcome, options) -> None:
    if options.out:
        shaped = outcome.sent[0] is not None
        head = machine() | {
            "hosts": options.hosts,
            "rate": options.rate if shaped else "unshaped",
            "status": outcome.status,
            "sent": outcome.sent,
        }
        with open(options.out, "w") as lines:
            lines.write(json.dumps(head) + "\n")
            for rank, rows in enumerate(outcome.rows):
                for row in rows:
                    lines.write(json.dumps({"rank": rank} | row) + "\n")
    if outcome.why:
        print(f"testbed: {outcome.why}", file=sys.stderr)
    sent = [f"{count / 1e6:.1f}" for count in outcome.sent if count is not None]
    sent_text = f", MB sent by each host: {' '.join(sent)}" if sent else ", unshaped"
    print(f"testbed: {outcome.seconds:.1f} s{sent_text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
