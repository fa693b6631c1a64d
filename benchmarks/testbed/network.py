"""Network namespaces on one bridge, each behind a link whose rate `tc` limits.

A host's link is a pair of virtual interfaces: `eth0` in the host, `port3` at the bridge,
which lives in a namespace of its own. What the host sends is limited at `eth0`, what it
receives at its port, each by an htb class. Its queue holds a thousand packets, so senders
are slowed by TCP and not by loss.

Everything made here carries a name that starts with the process which made it, and nothing
else is touched. `/etc/netns/NAME/hosts` gives each host its own address under the machine's
name: gloo looks that name up to learn where it listens.
"""

import contextlib
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple


NETNS = pathlib.Path("/etc/netns")
PREFIX = "testbed"
# What may pass at once after a pause. Small, or short messages would not be limited.
BURST = "8k"
QUEUE = 1000  # packets
# A packet handed to `tc` is a train of Ethernet frames; a long one is a burst as well.
TRAIN = 65_536  # bytes
# The one that every kernel has and allows in a namespace. With queues this long nothing is
# lost, so that they hardly differ.
CONGESTION_CONTROL = "reno"


class Cannot(Exception):
    """Why there can be no shaped network here."""


class Host(NamedTuple):
    """One host of the network.

    Attributes:
        namespace: Its network namespace.
        address: Its IPv4 address.
        port: The bridge's end of its link.
    """

    namespace: str
    address: str
    port: str


def bits_per_second(rate: str) -> float:
    """The bits a second of a rate of `tc`, such as "250mbit"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(k|m|g)?bit", rate.strip().lower())
    if not match or float(match[1]) == 0:
        raise ValueError(f"a rate is written like 250mbit or 1gbit, got {rate!r}.")
    return float(match[1]) * {None: 1e0, "k": 1e3, "m": 1e6, "g": 1e9}[match[2]]


def check() -> None:
    """Raises Cannot unless namespaces and their limits can be made here."""
    if os.geteuid() != 0:
        raise Cannot("network namespaces need root")
    for tool in ("ip", "tc"):
        if not shutil.which(tool):
            raise Cannot(f"there is no `{tool}`; it comes with iproute2")


def run(*command: str, namespace: str | None = None) -> str:
    """Runs a command, in a namespace if one is named, and returns what it printed."""
    inside = ("ip", "netns", "exec", namespace) if namespace else ()
    done = subprocess.run([*inside, *command], capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip() or f"exit status {done.returncode}"
        raise Cannot(f"`{' '.join(command)}` failed: {reason}")
    return done.stdout


def limit(namespace: str, interface: str, rate: str, verb: str = "change") -> None:
    """Sets the rate at which an interface sends."""
    # Spelled in bits: tc reads "0.1gbit", but not every version does.
    exact = f"{bits_per_second(rate):.0f}bit"
    run(
        *("tc", "class", verb, "dev", interface, "parent", "1:", "classid", "1:1"),
        *("htb", "rate", exact, "ceil", exact, "burst", BURST, "cburst", BURST),
        namespace=namespace,
    )


class Network:
    """Hosts on one bridge, from `with` to its end."""

    def __init__(self, hosts: int, rate: str, latency: str | None = None):
        if not 1 <= hosts <= 1000:
            raise ValueError(f"hosts must lie in 1 to 1000, got {hosts}.")
        bits_per_second(rate)
        self.rate, self.latency = rate, latency
        own = f"{PREFIX}-{os.getpid()}"
        self.switch = f"{own}-switch"
        self.hosts = [
            # 10.77.0.1 and up, past the zeros at the ends of blocks of 256.
            Host(f"{own}-{i}", f"10.77.{i // 250}.{i % 250 + 1}", f"port{i}")
            for i in range(hosts)
        ]

    def __enter__(self) -> "Network":
        check()
        try:
            self._make()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *_) -> None:
        self.remove()

    def _make(self) -> None:
        run("ip", "netns", "add", self.switch)
        run("ip", "link", "add", "bridge", "type", "bridge", namespace=self.switch)
        run("ip", "link", "set", "bridge", "up", namespace=self.switch)
        for host in self.hosts:
            self._make_host(host)

    def _make_host(self, host: Host) -> None:
        inside, at_bridge = host.namespace, self.switch
        names = NETNS / inside / "hosts"
        names.parent.mkdir(parents=True, exist_ok=True)
        names.write_text(f"127.0.0.1 localhost\n{host.address} {socket.gethostname()}\n")
        run("ip", "netns", "add", inside)
        run(
            *("ip", "link", "add", host.port, "netns", at_bridge, "type", "veth"),
            *("peer", "name", "eth0", "netns", inside),
        )
        control = f"net.ipv4.tcp_congestion_control={CONGESTION_CONTROL}"
        run("sysctl", "-q", "-w", control, namespace=inside)
        # Else a sender that pauses between steps starts each of them slowly.
        run("sysctl", "-q", "-w", "net.ipv4.tcp_slow_start_after_idle=0", namespace=inside)
        # Nothing that the new hosts say of themselves is to be counted.
        run("sysctl", "-q", "-w", "net.ipv6.conf.eth0.disable_ipv6=1", namespace=inside)
        address = f"{host.address}/16"
        run("ip", "address", "add", address, "dev", "eth0", namespace=inside)
        run("ip", "link", "set", host.port, "master", "bridge", namespace=at_bridge)
        for namespace, interface in ((inside, "eth0"), (at_bridge, host.port)):
            self._shape(namespace, interface)
            run("ip", "link", "set", interface, "up", namespace=namespace)
        run("ip", "link", "set", "lo", "up", namespace=inside)

    def _shape(self, namespace: str, interface: str) -> None:
        sizes = ("txqueuelen", str(QUEUE), "gso_max_size", str(TRAIN))
        run("ip", "link", "set", interface, *sizes, namespace=namespace)
        root = ("root", "handle", "1:", "htb", "default", "1")
        run("tc", "qdisc", "add", "dev", interface, *root, namespace=namespace)
        limit(namespace, interface, self.rate, "add")
        # Half of the latency at each end of a link: a message crosses two links.
        leaf = ("tc", "qdisc", "add", "dev", interface, "parent", "1:1")
        if self.latency is None:
            run(*leaf, "pfifo", "limit", str(QUEUE), namespace=namespace)
        elif interface == "eth0":
            delay = ("netem", "delay", self.latency, "limit", str(100 * QUEUE))
            try:
                run(*leaf, *delay, namespace=namespace)
            except Cannot as error:
                raise Cannot(
                    f"--latency is not to be had here: {error}. The kernel needs the netem "
                    "queueing discipline (module sch_netem)."
                ) from None

    def set_rate(self, rate: str) -> None:
        """Changes the rate of all links."""
        for host in self.hosts:
            limit(host.namespace, "eth0", rate)
            limit(self.switch, host.port, rate)
        self.rate = rate

    def remove(self) -> None:
        """Removes all namespaces that were made."""
        for namespace in [*(host.namespace for host in self.hosts), self.switch]:
            _remove(namespace)


@contextlib.contextmanager
def hosts(
    count: int, rate: str | None, latency: str | None = None
) -> Iterator[Network | None]:
    """A network of so many hosts, or None where there can be none: then use loopback.

    A message says that a rate that was asked for cannot be had. While the network lasts, an
    end by SIGTERM takes everything down as Ctrl-C does.
    """
    made = None
    if rate is not None:
        made = Network(count, rate, latency)
        try:
            check()
        except Cannot as error:
            if latency:
                raise
            print(f"testbed: {error}; over loopback instead, unshaped", file=sys.stderr)
            made = None
    if made is None:
        yield None
        return

    def interrupted(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupted)
    try:
        with made:
            yield made
    finally:
        signal.signal(signal.SIGTERM, before)


def _remove(namespace: str) -> None:
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)
    shutil.rmtree(NETNS / namespace, ignore_errors=True)


def left_behind() -> list[str]:
    """Removes the namespaces of testbeds whose process is gone, and returns their names."""
    removed = []
    for line in run("ip", "netns", "list").splitlines():
        name = re.match(rf"{PREFIX}-(\d+)-\w+", line)
        if name and not pathlib.Path("/proc", name[1]).exists():
            removed.append(name[0])
            _remove(name[0])
    return removed
