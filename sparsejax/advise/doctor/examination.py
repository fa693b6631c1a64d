"""The function `doctor`: examines a job, or a machine, and forecasts its traffic."""

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from sparsejax.advise.doctor import links, ranks as between
from sparsejax.advise.doctor.findings import NOTE, OK, WRONG, Finding, Report
from sparsejax.advise.explain.densities import Density
from sparsejax.advise.explain.explanation import Explanation, explain
from sparsejax.advise.explain.rows import CHOSEN
from sparsejax.advise.table import size
from sparsejax.arguments import check_positive
from sparsejax.axes import AxisName
from sparsejax.errors import ArgumentError, JobError, SparsejaxError
from sparsejax.jobs import store
from sparsejax.jobs.start import check
from sparsejax.placement import specs
from sparsejax.schemes.all_reduce import AllReduce
from sparsejax.schemes.forecast import Network
from sparsejax.transforms.systems import zen_sync


_NOISY = 1.5  # the ratio of the longest to the shortest time above which times are noisy
_WORTH = 0.9  # the share of the dense time below which a change pays, as in `explain`


def doctor(
    tx: optax.GradientTransformation | None = None,
    params: Any = None,
    *,
    mesh: Mesh | None = None,
    axis_name: AxisName | None = None,
    grad_fn: Callable[[Any, Any], Any] | None = None,
    batch: Any = None,
    arguments: Any = None,
    ranks: int | tuple[int, int] | None = None,
    network: Network | None = None,
    density: Density | None = None,
    ids: Mapping[str, int] | None = None,
    timeout: float = 60.0,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Checks whether a job is fit to train, and forecasts its synchronization.

    It checks versions, settings and arguments of all processes, their devices, kernels and
    network; whether gradients are local; and whether all processes hold the same parameters
    and would send the same messages. It forecasts what these messages cost on the measured
    network, next to a dense sum. It takes seconds, and sends messages. All processes of a
    job call it, and get the same report.

    Args:
        tx: The optimizer, with a synchronization in it; `zen_sync` if None.
        params: The parameters, or anything with their shapes and dtypes; None for no model.
        mesh: The mesh; if None, all devices on one axis, "data".
        axis_name: The mesh axis of the ranks, where the mesh has several axes.
        grad_fn: A function from the parameters and a rank's share of a batch to the
            gradient, as it is called inside `jax.shard_map`. It is traced, and not run.
        batch: A batch of all ranks for `grad_fn`, or anything with its shapes and dtypes.
        arguments: Values that must be equal on all processes, as in `check_job`.
        ranks: The number of ranks to forecast for, as in `explain`; those of the mesh if
            None.
        network: The bandwidth and latency between ranks; measured if None.
        density: As in `explain`.
        ids: As in `explain`.
        timeout: Seconds to wait for another process.
        progress: A function that is called with a line of text before each longer task.
            None prints nothing.

    Returns:
        A `Report`, whose text is `str(report)`, and whose `wrong` are the findings that
        must be fixed.

    Example:
        >>> report = sparsejax.doctor(tx, params, mesh=mesh)
        >>> if report.wrong:
        ...     raise SystemExit(str(report))

    See Also:
        `sparsejax.check_job`: compares the processes alone.
        `sparsejax.check_replicas`: compares the parameters during training.
        `sparsejax.explain`: makes the forecast alone, without devices.
    """
    check_positive("timeout", timeout)
    _check_transformation(tx)
    examination = _Examination(
        tx,
        params,
        mesh,
        axis_name,
        grad_fn,
        batch,
        arguments,
        ranks,
        network,
        density,
        ids,
        timeout,
        progress or (lambda line: None),
    )
    try:
        examination.run()
    except JobError as error:
        examination.add("job", WRONG, str(error))
    return examination.report()


def _check_transformation(tx):
    """Raises unless `tx` is an optax transformation, or None."""
    if tx is None or isinstance(tx, optax.GradientTransformation):
        return
    fix = " (parameters without an optimizer are params=)"
    if isinstance(tx, Mesh):
        fix = ": mesh= is a keyword, sparsejax.doctor(tx, params, mesh=mesh)"
    raise ArgumentError(
        "sparsejax.doctor: tx must be an optax transformation, such as "
        "optax.chain(sparsejax.zen_sync(), optax.adam(1e-3)), or None, got a "
        f"{type(tx).__name__}{fix}."
    )


@dataclasses.dataclass
class _Examination:
    """The arguments of `doctor`, and the findings so far."""

    tx: optax.GradientTransformation | None
    params: Any
    mesh: Mesh | None
    axis_name: AxisName | None
    grad_fn: Callable[[Any, Any], Any] | None
    batch: Any
    arguments: Any
    ranks: int | tuple[int, int] | None
    network: Network | None
    density: Density | None
    ids: Mapping[str, int] | None
    timeout: float
    progress: Callable[[str], None]
    findings: list[Finding] = dataclasses.field(default_factory=list)
    measured: links.Links | None = None
    explanation: Explanation | None = None

    def report(self) -> Report:
        return Report(tuple(self.findings), self.measured, self.explanation)

    def add(self, about: str, status: str, text: str, fix: str = "") -> None:
        self.findings.append(Finding(about, status, text, fix))

    def run(self) -> None:
        """Makes all checks; stops early if processes are not compatible enough for more."""
        self.progress("comparing versions, settings and arguments")
        wrong, answers = check.compare(self.arguments, self.timeout)
        for text in wrong:
            self.add("job", WRONG, text)
        versions = ", ".join(f"{k} {v}" for k, v in answers[0]["versions"].items())
        where = f" (process 0 on {answers[0]['host']})" if wrong else ""
        alone = " There is one process: nothing to compare." if len(answers) == 1 else ""
        status = NOTE if wrong or alone else OK
        self.add("versions", status, f"{versions}{where}.{alone}")
        if wrong:
            return self.add("job", NOTE, "nothing else was looked at: see above.")
        wrong, devices = check.compare_devices(answers, self.timeout)
        for text in wrong:
            self.add("devices", WRONG, text)
        if wrong:
            return self.add("job", NOTE, "nothing else was looked at: see above.")
        self._devices(answers, devices)
        self._kernels(answers, devices)
        mesh, axis_name = self.mesh, self.axis_name
        if mesh is None:
            mesh, axis_name = Mesh(np.array(jax.devices()), ("data",)), "data"
        axis_name = specs.data_axis(mesh, axis_name, "sparsejax.doctor")
        with jax.set_mesh(mesh):
            self._on_mesh(mesh, axis_name, [one["host"] for one in answers])
        return None

    def _on_mesh(self, mesh, axis_name, hosts):
        """Checks gradients, parameters, the network and the plan on the mesh."""
        self.findings.append(
            between.gradient(mesh, axis_name, self.grad_fn, self.params, self.batch)
        )
        if self.params is not None:
            self.findings.append(between.parameters(self.params, hosts, self.timeout))
        network = self._network(mesh, axis_name)
        if self.params is not None:
            self._plan(mesh, axis_name, network, hosts)
        elif self.tx is not None:
            text = "tx was not checked: no parameters were given."
            self.add("plan", NOTE, text, "Give doctor params=, or their shapes and dtypes.")

    def _devices(self, answers, devices):
        kinds = sorted({kind for one in devices for kind in one["kinds"]})
        count, hosts = len(answers), len({one["network"] for one in answers})
        where = f"one process on {answers[0]['host']}"
        if count > 1:
            named = dict.fromkeys(f"{t['host']} ({_address(t)})" for t in answers)
            where = f"{count} processes on {hosts} host{'s' * (hosts > 1)}: {_few(named)}"
        each = devices[0]["count"]
        what = f"{each} device{'s' * (each > 1)} ({', '.join(kinds)})"
        what += " each" * (count > 1)
        status, fix = OK, ""
        if len(kinds) > 1:
            status, fix = NOTE, "Devices of several kinds: all wait for the slowest."
        self.add("devices", status, f"{what}; {where}.", fix)

    def _kernels(self, answers, devices):
        for answer, has in zip(answers, devices, strict=True):
            if has["asked"]:
                fix = "Kernels raise there: unset the variable, or name one that can run."
                self.add("kernels", WRONG, f"on {answer['host']} {has['asked']}", fix)
        for name in ("triton", "pallas"):
            reasons = {one["kernels"][name] for one in devices}
            if reasons == {""}:
                self.add("kernels", OK, f"{name} can run.")
            elif devices[0]["platform"] == "cpu":
                text = f"{name} needs a GPU of NVIDIA; on CPUs plain XLA computes."
                self.add("kernels", NOTE, text)
            else:
                pairs = zip(answers, devices, strict=True)
                where = {one["host"] for one, has in pairs if has["kernels"][name]}
                text = f"{name} cannot run on {_few(where)}: {' '.join(sorted(reasons))}"
                self.add("kernels", NOTE, text, "Plain XLA computes instead.")

    def _network(self, mesh, axis_name) -> Network | None:
        """Returns the network, given or measured; None if there is none to measure."""
        network = self.network
        here, count = store.place(), specs.ranks_of(mesh, axis_name)
        if network is not None:
            text = f"taken to be {network.gbit_per_s:g} Gbit/s, {network.latency_us:g} us."
            self.add("network", NOTE, text)
            return network
        if count == 1:
            text = "there is one rank: nothing is sent."
            fix = "Give ranks= and network= for a forecast"
            options = "(--ranks, --gbit-per-s, --latency-us)."
            return self.add("network", NOTE, text, f"{fix} {options}")
        if here.processes == 1 and mesh.devices.flat[0].platform == "cpu":
            text = f"{count} simulated devices of one process have none to measure."
            return self.add("network", NOTE, text, "Give its numbers, or start a job.")
        found = links.measure(mesh, axis_name, self.progress, timeout=self.timeout)
        self.measured = found
        text = (
            f"{found.gbit_per_s:.3g} Gbit/s and {found.latency_us:.3g} us between {count} "
            f"ranks: a word {_time(found.short)}, {size(found.long.bytes)} gathered in "
            f"{_time(found.long)} and summed in {_time(found.dense)}, forecast "
            f"{1e3 * found.dense_forecast:.3g} ms."
        )
        is_noisy = max(found.long.spread, found.dense.spread) > _NOISY
        fix = (
            "Times vary: something else uses the hosts or the network." if is_noisy else ""
        )
        self.add("network", NOTE if is_noisy else OK, text, fix)
        return found.network

    def _plan(self, mesh, axis_name, network, hosts):
        tx = zen_sync(axis_name) if self.tx is None else self.tx
        ranks = _levels(mesh, axis_name) if self.ranks is None else self.ranks
        total = math.prod(ranks) if isinstance(ranks, tuple) else ranks
        assumed = network or Network(1.0, 0.0)
        found, why = None, ""
        try:
            found = explain(
                tx,
                self.params,
                ranks=ranks,
                network=assumed,
                density=self.density,
                ids=self.ids,
            )
        except SparsejaxError as error:
            why = str(error)
        agreed = between.plan(repr(found.rows) if found else why, hosts, self.timeout)
        if found is None:
            return self.add("plan", WRONG, why)
        self.findings.append(agreed)
        if network is None or total == 1:
            return None
        self.explanation = found
        chosen, dense = (
            sum((row.milliseconds[name] or 0.0) / row.every for row in found.rows)
            for name in (CHOSEN, AllReduce.__name__)
        )
        dense_bytes = sum(row.dense_bytes / row.every for row in found.rows)
        better = chosen < _WORTH * dense
        every = sorted({row.every for row in found.rows} - {1})
        often = " or ".join(map(str, every))
        often = f", of {often} to an exchange and on average," if every else ""
        text = (
            f"on {total} ranks a step{often} sends {size(found.step_bytes)} in "
            f"{chosen:.3g} ms, densely {size(dense_bytes)} in {dense:.3g} ms; "
            f"{' '.join(found.assumed)}"
        ).rstrip(" ;")
        text = text if text.endswith(".") else text + "."
        self.add("sync", OK if better else NOTE, text, found.advice)
        for row in found.rows:
            if row.verdict:
                self.add("sync", NOTE, f"{row.name}: {row.verdict}.")
        return None


def _levels(mesh, axis_name):
    """Returns the number of ranks, or a pair for two axes, as `explain` takes it."""
    if isinstance(axis_name, tuple) and len(axis_name) == 2:
        return mesh.shape[axis_name[0]], mesh.shape[axis_name[1]]
    return specs.ranks_of(mesh, axis_name)


def _address(answer):
    return ", ".join(answer["own_address"]) or "of no known address"


def _few(names, most: int = 4) -> str:
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _time(times: links.MessageTimes) -> str:
    """Returns a median as text, with the least and the most."""
    scale, unit = (1e6, "us") if times.median < 1e-3 else (1e3, "ms")
    return (
        f"{scale * times.median:.3g} {unit} ({scale * times.least:.3g} to "
        f"{scale * times.most:.3g})"
    )


def to_stderr(line: str) -> None:
    """Writes a line of progress to stderr, separate from the report."""
    print(line, file=sys.stderr, flush=True)
