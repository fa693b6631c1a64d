"""The command line that every example has."""

import argparse
from collections.abc import Collection, Sequence


def parser(
    name: str,
    doc: str,
    syncs: Collection[str],
    *,
    default: Sequence[str] | None = None,
    steps: int = 100,
    devices: int = 8,
) -> argparse.ArgumentParser:
    """A parser with the options that all examples have; an example adds its own.

    Args:
        name: The example's module.
        doc: Its docstring; the first line is shown.
        syncs: The choices of `--sync`.
        default: The default of `--sync`; all of them if None.
        steps: Those of a run, by default.
        devices: How many are simulated, by default.
    """
    made = argparse.ArgumentParser(
        prog=f"python -m examples.{name}", description=doc.splitlines()[0]
    )
    made.add_argument(
        "--steps", type=int, default=steps, help=f"steps of each run ({steps})"
    )
    made.add_argument(
        "--sync",
        nargs="+",
        choices=list(syncs),
        default=list(default or syncs),
        help="how gradients are averaged: a run for each, the first is compared with",
    )
    made.add_argument(
        "--devices",
        type=int,
        default=devices,
        help=f"simulated devices ({devices}); 0 for the present ones",
    )
    made.add_argument(
        "--size", choices=["small", "paper"], default="small", help="of the model (small)"
    )
    made.add_argument("--seed", type=int, default=0, help="of parameters and batches (0)")
    made.add_argument("--checkpoint", metavar="DIR", help="keep the state of each run here")
    made.add_argument(
        "--save-every", type=int, default=100, metavar="N", help="steps (100), and the last"
    )
    made.add_argument("--resume", action="store_true", help="resume from the checkpoint")
    made.add_argument("--logdir", metavar="DIR", help="write curves for TensorBoard here")
    made.add_argument(
        "--plot",
        nargs="?",
        const=f"{name}.png",
        metavar="FILE",
        help=f"plot to {name}.png or FILE",
    )
    made.add_argument("--json", action="store_true", help="print the figures as JSON")
    return made


def parse(made: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The parsed options; ends the script with a sentence where they are not possible.

    Args:
        made: From `parser`.
        argv: As on the command line; None for those of the process.
    """
    options = made.parse_args(argv)
    options.example = made.prog.rpartition(".")[2]
    if options.steps < 2:
        made.error(f"--steps takes at least two steps, got {options.steps}")
    if options.devices < 0:
        made.error(f"--devices takes a number of devices, or 0; got {options.devices}")
    if options.save_every < 1:
        made.error(f"--save-every takes at least one step, got {options.save_every}")
    if options.resume and not options.checkpoint:
        made.error("--resume goes on from a checkpoint: name its folder with --checkpoint")
    if len(set(options.sync)) < len(options.sync):
        made.error(f"--sync names each way once, got {' '.join(options.sync)}")
    return options
