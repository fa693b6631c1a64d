"""optax's own tests of its optimizers, over `sparsejax.lazy` of each.

    python -m tests.peers.optax_aliases [--record]

Runs `alias_test.py` of the optax that is installed, which has its tests in it, with
`lazy(optax.X(...))` wherever a test makes an optax.X that keeps rows apart, and as it is
elsewhere. Gradients there are arrays, so each has to be the optimizer itself. The first run
is without any replacement, and what fails there is no matter of ours. Prints what else
fails, and writes benchmarks/results/peers-optax-*.jsonl with --record.
"""

import importlib.metadata
import sys
import unittest
import warnings
from unittest import mock

import jax


# Processes of optax's tests see one device, and types promote as by default.
jax.config.update("jax_num_cpu_devices", 1)

from optax._src import alias_test  # noqa: E402

from benchmarks.harness.record import Recorder, say  # noqa: E402
from sparsejax import lazy  # noqa: E402
from sparsejax.errors import ArgumentError  # noqa: E402


# They take a norm over a leaf, factor it, or draw noise, or their steps are told apart by
# more than a count: `lazy` refuses them by name.
MIXING = {"adafactor", "fromage", "lamb", "lars", "noisy_sgd", "novograd", "polyak_sgd"}
MIXING |= {"lbfgs", "sm3"}
MIXING |= {"optimistic_adam", "optimistic_adam_v2", "optimistic_gradient_descent"}


def over_lazy(get):
    """optax's `_get_opt`, with optimizers inside `lazy`."""

    def get_lazily(test, name):
        factory = get(test, name)
        if name in MIXING:
            return factory
        # inject_hyperparams reads the signature, which stays.
        return _Lazily(factory)

    return get_lazily


class _Lazily:
    """A factory of optimizers that makes each lazy."""

    def __init__(self, factory):
        self.__wrapped__ = factory

    def __call__(self, *args, **kwargs):
        return lazy(self.__wrapped__(*args, **kwargs))


def run(replaced: bool) -> tuple[int, int, dict[str, str]]:
    """Runs the tests: how many, how many of them are skipped, and what failed, with why."""
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(alias_test.AliasTest)
    result = unittest.TestResult()
    get = alias_test._get_opt
    wrapped = over_lazy(get) if replaced else get
    with mock.patch.object(alias_test, "_get_opt", wrapped), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        suite.run(result)
    wrong = result.failures + result.errors
    return (
        result.testsRun,
        len(result.skipped),
        {str(test): text.strip().splitlines()[-1][:300] for test, text in wrong},
    )


def refused() -> list[str]:
    """The optimizers of the list above that `lazy` takes all the same."""
    params = {"table": jax.numpy.ones((4, 3))}
    taken = []
    for case in alias_test._OPTIMIZERS_UNDER_TEST:
        name = case["opt_name"]
        if name not in MIXING:
            continue
        try:
            lazy(getattr(alias_test.alias, name)(**case["opt_kwargs"])).init(params)
        except ArgumentError:
            continue
        taken.append(name)
    return taken


def main(argv: list[str]) -> int:
    version = importlib.metadata.version("optax")
    tests, skipped, theirs = run(replaced=False)
    say(f"optax {version}: {tests} tests of alias_test.AliasTest, {skipped} skipped")
    say(f"as they are: {len(theirs)} fail")
    _, _, found = run(replaced=True)
    ours = {test: why for test, why in found.items() if test not in theirs}
    say(f"with lazy(optax.X) in place of each that keeps rows apart: {len(ours)} more fail")
    for test, why in ours.items():
        say(f"  {test}: {why}")
    unrefused = refused()
    if unrefused:
        say(f"lazy takes these, and they were tested without it: {unrefused}")
    if "--record" in argv:
        command = "python -m tests.peers.optax_aliases --record"
        record = Recorder("peers-optax", command, ("optax",))
        record.add(
            optax=version,
            tests=tests,
            skipped=skipped,
            failing_without=len(theirs),
            failing_with=len(ours),
            failures=ours,
            not_lazy=sorted(MIXING),
        )
        say(f"written: {record.write()}")
    return bool(ours or unrefused)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
