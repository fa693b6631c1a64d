"""The function `explain`: forecasts a synchronization, without any device.

    network = sparsejax.Network(gbit_per_s=25, latency_us=20)
    print(sparsejax.explain(tx, params, ranks=16, network=network))

For each group of leaves that are exchanged together, it lists the scheme and the unit, the
bytes that one rank would send and those of a dense sum, the time of every scheme, and the
density and the bandwidth up to which sending entries pays. It adds the cost of a step, the
assumptions, the number of exchanges to compile, and one sentence of advice.
"""

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax

from sparsejax import arguments, schemes
from sparsejax.advise import codec
from sparsejax.advise.explain import advice, printed, reading
from sparsejax.advise.explain.densities import Density, densities, listed
from sparsejax.advise.explain.rows import CHOSEN, Row, SchemeTimes, row_of
from sparsejax.advise.network import check_network
from sparsejax.advise.plan import MOST_RANKS
from sparsejax.errors import ArgumentError
from sparsejax.schemes.base import LossyScheme
from sparsejax.schemes.forecast import Network, for_platform
from sparsejax.schemes.or_dense import refuses_numbers


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The forecasts of `explain`; `print` shows them as tables.

    Attributes:
        ranks: The number of ranks; for two levels, of hosts.
        inner: The number of ranks of a host; 1 for one level.
        network: The network between the ranks.
        platform: The platform on which steps will run.
        rows: One entry for each group of leaves that are exchanged together, in the order
            of the tree.
        assumed: The assumptions, a sentence for each.
        compiling: A sentence about the exchanges to compile.
        advice: A sentence of advice.

    Example:
        >>> network = sparsejax.Network(gbit_per_s=25, latency_us=20)
        >>> cost = sparsejax.explain(tx, params, ranks=16, network=network)
        >>> cost.ranks
        16
    """

    ranks: int
    inner: int
    network: Network
    platform: str
    rows: tuple[Row, ...]
    assumed: tuple[str, ...]
    compiling: str
    advice: str

    def row(self, path: str) -> Row:
        """Returns the row of the leaf with this path."""
        for row in self.rows:
            if path in row.paths:
                return row
        paths = [path for row in self.rows for path in row.paths]
        raise ArgumentError(f"no leaf {path!r} is exchanged; there are {paths}.")

    @property
    def step_bytes(self) -> float:
        """The bytes that one rank sends in a step, on average."""
        return sum(row.sent_bytes / row.every for row in self.rows)

    @property
    def step_milliseconds(self) -> float:
        """The milliseconds of a step on the network, on average."""
        return sum((row.milliseconds[CHOSEN] or 0.0) / row.every for row in self.rows)

    def to_json(self) -> str:
        """Returns the whole forecast as a JSON object, with null for an infinite number."""
        return codec.dumps(self)

    def __str__(self) -> str:
        ranks = f"{self.ranks} ranks"
        if self.inner > 1:
            ranks = f"{self.ranks} hosts of {self.inner} ranks"
        network = f"{self.network.gbit_per_s:g} Gbit/s, {self.network.latency_us:g} us"
        head = f"{ranks}, {network}, on {self.platform.upper()}s"
        parts = [*printed.tables(self.rows, self.network)]
        parts.append([*self.assumed, self.compiling])
        parts.append([self.advice])
        return "\n\n".join([head, *("\n".join(lines) for lines in parts)])


def explain(
    tx: optax.GradientTransformation,
    params: Any,
    *,
    ranks: int | tuple[int, int],
    network: Network,
    density: Density | None = None,
    ids: Mapping[str, int] | None = None,
    platform: str | None = None,
) -> Explanation:
    """Forecasts bytes and times of the synchronizations in an optimizer, without devices.

    From the optimizer it reads which leaves are exchanged together, by which scheme; the
    density of a sparsifier, after any warm-up; and the number of steps for each exchange
    (`sparsejax.accumulate`, `sparsejax.local_steps`).

    Args:
        tx: The optimizer, with a synchronization somewhere in it.
        params: The parameters, or anything with their shapes and dtypes.
        ranks: The number of ranks, at most 2**24; a pair (hosts, ranks of a host) for two
            levels.
        network: The bandwidth and latency between the ranks.
        density: The share of non-zero units of a rank's gradient of one step, before any
            sparsifier: one number; numbers by regular expressions, searched in the paths; a
            result of `sparsejax.profile`; or a list of these, one for each step. Leaves
            without one are assumed to be dense, except for tables: a leaf of two axes whose
            path contains "embed" or "table", with at least four times as many rows as
            columns, is assumed to have 1% of its rows, and the result says so. If only
            numbers are given, the non-zero units of the ranks are assumed to be
            independent, which overlap least. For `sparsejax.local_steps` it is the share of
            non-zero offsets of a round, by default 1: momentum and decay change parameters
            without a gradient.
        ids: The number of ids of rows that a rank lists in a step, {pattern of paths:
            number}, for tables whose gradients are `RowGrads`: an example with 26 features
            has 26. Their density is then that of distinct rows. Without a density, ids are
            assumed to be drawn uniformly from all rows, which repeats least.
        platform: "cpu", "gpu" or "tpu": the platform on which steps will run, since message
            sizes and the choice of a dense sum depend on it. If None, JAX's default
            platform.

    Returns:
        An `Explanation`, to be printed or read.

    Example:
        >>> shapes = {"embedding": jax.ShapeDtypeStruct((50_000, 512), jnp.float32)}
        >>> network = sparsejax.Network(gbit_per_s=25, latency_us=20)
        >>> cost = sparsejax.explain(tx, shapes, ranks=16, network=network)
        >>> print(cost)

    See Also:
        `sparsejax.metrics`: returns the bytes of a run, as numbers.
        `sparsejax.summary`: returns the bytes of a run, as a table.
        `sparsejax.residuals`: returns the residuals of a run.
    """
    check_network(network)
    if platform is not None:
        arguments.check_one_of("platform", platform, ("cpu", "gpu", "tpu"))
    hosts, inner = _hosts_and_inner(ranks)
    known = densities(density, hosts * inner)
    groups = reading.groups_of(tx, params, hosts, known, listed(ids))
    _check_levels(groups, isinstance(ranks, tuple))
    times = SchemeTimes(network, inner)
    platform = platform or jax.default_backend()
    with for_platform(platform):
        groups = list(map(_suited, groups))
        rows = tuple(row_of(group, times) for group in groups)
        return Explanation(
            hosts,
            inner,
            network,
            platform,
            rows,
            (*advice.assumed(groups, rows), *advice.of_shards(params)),
            advice.compiling(rows),
            advice.advise(groups, rows, times),
        )


def _suited(group: reading.Group) -> reading.Group:
    """Returns the group, with a dense sum if `schemes.or_dense.suited` would choose it."""
    scheme, are_numbers = group.scheme, group.unit == "element"
    refused = refuses_numbers(scheme, are_numbers, group.load.ranks, group.shared)
    if not refused or isinstance(scheme, LossyScheme):
        return group
    return dataclasses.replace(group, scheme=schemes.AllReduce(scheme.wire_dtype))


def _hosts_and_inner(ranks) -> tuple[int, int]:
    """Returns the numbers of hosts and of ranks of a host; one int is hosts of one rank."""
    pair = ranks if isinstance(ranks, tuple) else (ranks, 1)
    if len(pair) != 2 or any(
        isinstance(n, bool) or not isinstance(n, numbers.Integral) or n < 1 for n in pair
    ):
        raise ArgumentError(
            "ranks must be a positive int, or a pair (hosts, ranks of a host), got "
            f"{ranks!r}."
        )
    hosts, inner = int(pair[0]), int(pair[1])
    if hosts * inner > MOST_RANKS:
        raise ArgumentError(
            f"ranks must be at most {MOST_RANKS:,} in all, above any job, got {ranks!r}: "
            "give the number of devices that will train."
        )
    return hosts, inner


def _check_levels(groups: Sequence[reading.Group], two: bool) -> None:
    """Raises if ranks are a pair and the schemes have one level, or the reverse."""
    levels = [isinstance(group.scheme, schemes.TwoLevel) for group in groups]
    sparse = [not group.scheme.is_dense for group in groups]
    if any(levels) and not two:
        raise ArgumentError(
            "the synchronization has two levels, and ranks is one number: pass "
            "ranks=(hosts, ranks of a host)."
        )
    if two and any(sparse) and not any(levels):
        raise ArgumentError(
            "ranks is a pair, and the synchronization has one level: give it two axes, "
            'as in sparsejax.zen_sync(("hosts", "devices")), or pass one number.'
        )
