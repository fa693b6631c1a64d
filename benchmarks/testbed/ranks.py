"""Runs the function `rank` of a module once in each host, with the settings of a benchmark.

    python -m benchmarks.testbed.ranks benchmarks.network.messages

is the program of a host: it reads the module's `Settings` from its environment.
"""

import importlib
import os
import sys

from benchmarks.harness.settings import Settings
from benchmarks.testbed import job
from benchmarks.testbed.network import Network


def run(
    module: str,
    settings: Settings,
    hosts: int,
    network: Network | None,
    timeout: float,
    python: str = sys.executable,
    cache: str | None = None,
) -> list[tuple[dict, ...]] | None:
    """Runs `rank(settings)` of a module on hosts of a network.

    Args:
        module: The module, which has `Settings` and `rank`.
        settings: An instance of its `Settings`.
        hosts: How many hosts.
        network: Where; None for loopback.
        timeout: Seconds after which all is ended.
        python: The interpreter.
        cache: A folder in which JAX keeps what it compiled for later runs.

    Returns:
        For each row that ranks reported the rows of all ranks; None, and a message, if a
        rank failed.
    """
    environment = settings.environment() | {"PYTHONPATH": os.getcwd()}
    if cache:
        environment["JAX_COMPILATION_CACHE_DIR"] = cache
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    command = [python, "-m", "benchmarks.testbed.ranks", module]
    outcome = job.run(command, hosts, network, timeout, environment=environment)
    if outcome.status:
        print(f"{module} failed: {outcome.why}", flush=True)
        return None
    return list(zip(*outcome.rows, strict=True))


def main() -> None:
    module = importlib.import_module(sys.argv[1])
    module.rank(module.Settings.from_environment())


if __name__ == "__main__":
    main()
