"""Checks that the processes of a job are compatible, before any collective.

Processes that are not would compile different programs, and wait for one another in
collectives that never complete.
"""

from typing import Any

from sparsejax.arguments import check_positive
from sparsejax.errors import JobError
from sparsejax.jobs import store
from sparsejax.jobs.agreement import differences
from sparsejax.jobs.start import coordinator, facts


def check_job(arguments: Any = None, *, timeout: float = 60.0) -> None:
    """Checks that the processes of a job fit together, and raises on all of them if not.

    Call it at the start of a script, after `jax.distributed.initialize`. It compares the
    versions of sparsejax, JAX, jaxlib, optax and Python; settings that decide what is
    compiled; the script's arguments; whether hosts reach one another under their names; the
    devices of each process; and its index with JAX_PROCESS_ID. In a job of one process
    there is nothing to compare.

    It uses the job's coordinator and no collective, so it returns even if a collective
    would wait forever.

    Args:
        arguments: Values that must be equal on all processes: the script's arguments as a
            mapping, an `argparse.Namespace` or a list of strings. Leave out those that
            differ by rank.
        timeout: Seconds to wait for the other processes.

    Raises:
        JobError: On all processes, with every difference and the hosts concerned.

    Example:
        >>> sparsejax.check_job(arguments={"steps": 100, "rate": 1e-3})

    See Also:
        `sparsejax.doctor`: checks this and more, and measures the network.
        `sparsejax.check_replicas`: compares the parameters during training.
        `sparsejax.advise.check_coordinator`: checks that all processes are there, before
        JAX joins the job.
        `sparsejax.advise.watch_job`: ends the job if a process is lost.
    """
    check_positive("timeout", timeout)
    if store.place().processes == 1:
        return
    wrong, answers = compare(arguments, timeout)
    if not wrong:
        wrong, _ = compare_devices(answers, timeout)
    if wrong:
        raise JobError("this job cannot train:\n" + "\n".join(f"* {one}" for one in wrong))


def compare(arguments: Any, timeout: float) -> tuple[list[str], list[dict]]:
    """Returns a sentence for each difference, and the facts about each process."""
    here = store.place()
    own = facts.of_process(arguments, here.coordinator)
    answers = store.of_all("what it is", own, timeout)
    return disagreements(answers, here.coordinator), answers


def compare_devices(answers: list[dict], timeout: float) -> tuple[list[str], list[dict]]:
    """Returns a sentence for each difference of devices, and the devices of each process.

    Args:
        answers: The facts about each process.
        timeout: Seconds to wait for the other processes.
    """
    hosts = [one["host"] for one in answers]
    try:
        own = facts.devices()
    except Exception as error:  # drivers raise any type; the others must not wait
        own = {"error": f"{type(error).__name__}: {error}"}
    all_devices = store.of_all("which devices it has", own, timeout, hosts)
    found = [
        f"host {hosts[process]} (process {process}) cannot use its devices: "
        f"{one['error'].rstrip('.')}. Mend that host, or leave it out."
        for process, one in enumerate(all_devices)
        if "error" in one
    ]
    if found:
        return found, all_devices
    for what, key in (("the number of devices", "count"), ("the platform", "platform")):
        values = dict(enumerate(one[key] for one in all_devices))
        fix = "Give each process as many devices of one kind, or leave that host out."
        found += [f"{text}. {fix}" for text in differences(what, values, hosts)]
    if all_devices[0]["platform"] == "cpu" and _hosts(answers) > 1:
        found += _unreachable(answers)
    return found, all_devices


def disagreements(answers: list[dict], address: str | None) -> list[str]:
    """Returns a sentence for each difference of the facts about processes."""
    hosts = [one["host"] for one in answers]
    found = []
    if _hosts(answers) > 1:
        found += _misled(answers, address)
    found += _misnumbered(answers)
    for kind, fix in (
        ("versions", "Install the same on all hosts"),
        ("settings", "Set the same on all hosts"),
        ("arguments", "Start the script with the same arguments everywhere"),
    ):
        names = dict.fromkeys(name for one in answers for name in one[kind])
        for name in names:
            values = dict(enumerate(one[kind].get(name, "nothing") for one in answers))
            label = f"the argument {name}" if kind == "arguments" else name
            label = "the command line" if name == "arguments" else label
            found += [f"{text}. {fix}." for text in differences(label, values, hosts)]
    return found


def _hosts(answers):
    """Returns the number of hosts."""
    return len({one["network"] for one in answers})


def _misled(answers, address):
    """Yields a message for each process that resolves the coordinator to a loopback."""
    for process, one in enumerate(answers):
        if facts.is_loopback(one["coordinator"]):
            who = f"host {one['host']} (process {process})"
            yield coordinator.loopback(address, one["coordinator"], who)


def _misnumbered(answers):
    """Yields a message for each process whose environment gives it another index."""
    for process, one in enumerate(answers):
        named = one.get("launcher", {}).get(facts.FOR_JAX)
        if named and named != str(process):
            yield facts.misnumbered(named, process, f"host {one['host']}")


def _unreachable(answers):
    """Yields a message for each process whose host resolves its own name to a loopback."""
    for process, one in enumerate(answers):
        if facts.is_loopback(one["own_address"]):
            own = ", ".join(one["own_address"])
            yield (
                f"host {one['host']} (process {process}) has {own} under its own name, an "
                "address that no other host can reach, and collectives on CPUs (gloo) "
                "listen there: give the name its address in the network in /etc/hosts."
            )
