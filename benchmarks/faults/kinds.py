"""The faults: what happens to a host, and what the job has to do then. A new one goes here.

A fault is a function that injects it on the host that calls it, and an entry of `FAULTS`
with what is promised. From the entry it is injected (`rank.Injection`), chosen
(`--faults`), judged (`benchmarks.faults`) and described (`docs/faults.py`).
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from benchmarks.testbed import host, network


ALLOWED = 5.0  # seconds in which a job has to end, beside those of silence


class Fault(NamedTuple):
    """What happens to a host.

    Attributes:
        name: Its name, for `--faults`.
        text: What the host does, for pages; `{seconds}` is how long it lasts.
        inject: Does it, on the host. It is given the host and those seconds, and says
            whether the host is to leave its block.
        ends: Whether the job is to end.
        silent: Whether that is found by silence, and not at once.
        lasts: How long it lasts, as a multiple of the time of silence.
        between: Whether it happens between steps, in the thread that trains; else at a
            random time of a step, in another.
        cuts: Whether the host does not hear the others either: it ends by the name of
            process 0.
        of_network: Whether it needs hosts with networks of their own, and so root.
    """

    name: str
    text: str
    inject: Callable[[host.Here, float], bool | None]
    ends: bool
    silent: bool = False
    lasts: float = 0.0
    between: bool = False
    cuts: bool = False
    of_network: bool = False

    def seconds(self, silence: float) -> float:
        """Returns how long it lasts."""
        return self.lasts * silence

    def within(self, silence: float) -> float:
        """Seconds in which the job has to end."""
        return ALLOWED + (silence if self.silent else 0.0)


def kill(here: host.Here, seconds: float) -> None:
    del here, seconds
    os.kill(os.getpid(), signal.SIGKILL)


def run_out_of_memory(here: host.Here, seconds: float) -> None:
    del here, seconds
    np.ones(1 << 50)  # More than there can be; NumPy raises MemoryError.


def leave_with_status_0(here: host.Here, seconds: float) -> None:
    del here, seconds
    sys.exit(0)


def leave_the_block(here: host.Here, seconds: float) -> bool:
    del here, seconds
    return True


def stand_still(here: host.Here, seconds: float) -> None:
    del here
    again = f"sleep {seconds}; kill -CONT {os.getpid()}"
    quiet = subprocess.DEVNULL  # else whoever reads this host's output waits for it
    subprocess.Popen(["sh", "-c", again], start_new_session=True, stdout=quiet)
    os.kill(os.getpid(), signal.SIGSTOP)


def cut_off(here: host.Here, seconds: float) -> None:
    del seconds
    network.run("ip", "link", "set", "eth0", "down", namespace=here.namespace)


def halve_the_rate(here: host.Here, seconds: float) -> None:
    del seconds
    assert here.namespace
    assert here.switch
    half = f"{network.bits_per_second(here.rate) / 2:.0f}bit"
    network.limit(here.namespace, "eth0", half)
    network.limit(here.switch, f"port{here.rank}", half)


STILL = "is suspended for {seconds:.0f} s, "
FAULTS = {
    fault.name: fault
    for fault in (
        Fault("kill", "is killed", kill, ends=True),
        Fault("memory", "is out of memory", run_out_of_memory, ends=True, between=True),
        Fault(
            "exit",
            "exits with status 0, in the middle of the job",
            leave_with_status_0,
            ends=True,
            between=True,
        ),
        Fault(
            "leave",
            "leaves its block before the others",
            leave_the_block,
            ends=True,
            silent=True,
            between=True,
        ),
        Fault(
            "stop",
            STILL + "longer than the time of silence",
            stand_still,
            ends=True,
            silent=True,
            lasts=2.0,
        ),
        Fault(
            "cut",
            "is cut off from the network",
            cut_off,
            ends=True,
            silent=True,
            cuts=True,
            of_network=True,
        ),
        Fault("pause", STILL + "shorter than that", stand_still, ends=False, lasts=0.4),
        Fault("rate", "has half its rate", halve_the_rate, ends=False, of_network=True),
    )
}
