"""Compares between processes what they are about to train, before the first collective.

Processes with different models or options compile different programs, and wait for one
another in collectives that never complete; or these complete, and replicas diverge. So
every function that makes a state on a mesh lets the processes of that mesh compare versions
and settings, the mesh, the tree of parameters, the transformation with its options, and the
numbers in its update. No devices are used: see `jobs.agreement`. In a job of one process
nothing is compared.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import Mesh, PartitionSpec

from sparsejax import arguments
from sparsejax.axes import AxisName
from sparsejax.errors import JobError
from sparsejax.jobs import agreement, store, versions
from sparsejax.jobs.agreement import Remedy
from sparsejax.jobs.texts import text_of
from sparsejax.placement.flow import flow_of
from sparsejax.state import observing, sharded, tree


TIMEOUT = agreement.TIMEOUT

_SAME = "Give all processes the same"
_REMEDIES = {
    "versions": Remedy("Install the same on all hosts."),
    "settings": Remedy("Set the same on all hosts."),
    "mesh": Remedy(f"{_SAME} mesh, of all devices in one order."),
    "parameters": Remedy(f"{_SAME} model."),
    "variables": Remedy(f"{_SAME} variables."),
    "transformation": Remedy(f"{_SAME} optimizer, rules and plan."),
    "table": Remedy(f"{_SAME} key and init, or the same numbers."),
    "numbers": Remedy(
        f"{_SAME} optimizer, with the same learning rate and options.",
        # They decide which operations an update has.
        causes=("versions", "settings", "mesh", "parameters", "transformation"),
    ),
    "flow": Remedy(
        f"{_SAME} optimizer: the order of its chain, masks and labels.",
        causes=("versions", "settings", "mesh", "parameters", "transformation", "numbers"),
    ),
    "trainer": Remedy(f"{_SAME} arguments of sparsejax.data_parallel and trainer.init."),
}


class Setup:
    """The values on which the processes of a mesh must agree before the first collective.

    Attributes:
        topics: The values of this process, by topic and name, filled by the `say` methods.
    """

    topics: dict[str, dict[str, str]]

    def __init__(self, call: str, mesh: Any, timeout: float | None, given: Any = None):
        """Finds the processes to compare with; `made_ready` compares.

        Args:
            call: The public function that makes a state, for messages.
            mesh: The mesh on which it is made.
            timeout: Seconds to wait for the other processes; None compares nothing.
            given: The values from which the state is made. If they are traced, nothing is
                compared.
        """
        if timeout is not None:
            arguments.check_positive("timeout", timeout)
        self._call, self._timeout = call, timeout or 0.0
        self._processes = ()
        self.topics = {}
        here = store.place()
        if here.processes == 1 or timeout is None or not isinstance(mesh, Mesh):
            return
        if not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(given)):
            processes = agreement.processes_of(mesh.devices.flat)
            self._processes = processes if here.process in processes else ()

    @property
    def is_shared(self) -> bool:
        """Whether there is another process to compare with."""
        return len(self._processes) > 1

    @contextlib.contextmanager
    def made_ready(self) -> Iterator[None]:
        """Compares, at the end of a block, the values that were added inside.

        If the block raises, the error is sent to the others, so that they do not wait.

        Raises:
            JobError: On all processes, with the differences and the processes that have
                each value.
        """
        if not self.is_shared:
            yield
            return
        try:
            yield
        except Exception as error:
            try:
                self._disagreements(f"{type(error).__name__}: {error}")
            except JobError:
                pass  # Another process does not answer, but this error is more specific.
            raise
        if wrong := self._disagreements(""):
            raise JobError(
                f"{self._call}: the processes of this job are not about to train the same:"
                "\n" + "\n".join(f"* {one}" for one in wrong)
            )

    def _disagreements(self, why):
        topics = {
            "versions": versions.versions(),
            "settings": versions.settings(),
            **self.topics,
        }
        return agreement.disagreements(
            self._call, topics, _REMEDIES, self._processes, self._timeout, why
        )

    def say(self, topic: str, values: Mapping[str, Any]) -> None:
        """Adds values, by name, to a topic of this process."""
        texts = {k: v if isinstance(v, str) else text_of(v) for k, v in values.items()}
        self.topics.setdefault(topic, {}).update(texts)

    def say_mesh(self, mesh: Mesh, axis_name: AxisName) -> None:
        """Adds the mesh and the axis of the ranks."""
        if not self.is_shared:
            return
        sizes = ", ".join(f"{name} = {size}" for name, size in mesh.shape.items())
        devices = ", ".join(str(device.id) for device in mesh.devices.flat)
        kinds = sorted({device.device_kind for device in mesh.devices.flat})
        found = {"the mesh": sizes, "the axis of the ranks": text_of(axis_name)}
        found |= {"the order of devices": devices, "the kind of devices": text_of(kinds)}
        self.say("mesh", found)

    def say_tree(self, topic: str, what: str, given: Any, specs: Any = None) -> None:
        """Adds the paths, shapes, dtypes and specs of a tree.

        Args:
            topic: The topic to which they are added.
            what: A noun for its leaves, for messages.
            given: The tree.
            specs: A PartitionSpec for each leaf; None if all are replicated.
        """
        if not self.is_shared:
            return
        paths, leaves, _ = tree.flatten(given, self._call, rows=True)
        is_spec = lambda x: isinstance(x, PartitionSpec)
        all_specs = [PartitionSpec()] * len(leaves)
        if specs is not None:
            all_specs = jax.tree.leaves(specs, is_leaf=is_spec)
        found = {}
        for path, leaf, spec in zip(paths, leaves, all_specs, strict=True):
            by = f" sharded {spec}" if any(part is not None for part in spec) else ""
            found[f"{what} {path!r}"] = f"{_kind(leaf)}{by}"
        apart = sharded.apart(given)
        for path, node in zip(apart.paths, apart.nodes, strict=True):
            # Its type and its static data: the number of its columns, and its axis.
            found[f"the table {path!r}"] = str(jax.tree.structure(node))
        self.say(topic, found)

    def say_transformation(
        self,
        tx: optax.GradientTransformation,
        params: Any,
        numbers: Mapping[str, str],
        flow: str,
    ) -> None:
        """Adds the parts of a chain with their options, and the numbers in its update.

        Args:
            tx: The chain.
            params: The parameters, or their shapes and dtypes.
            numbers: The numbers in its update, as `program.numbers_of` returns them.
            flow: What they are applied to, as `flow.flow_of` returns it.
        """
        if not self.is_shared:
            return
        seen = observing.observed(tx, params)
        found: dict[str, str] = {}
        for what, parts in (
            ("the synchronization", seen.exchanges),
            ("the sparsifier", seen.sparsifiers),
            ("the optimizer of rows", seen.rows),
            ("what is known of the next batch", seen.ahead),
        ):
            for number, part in enumerate(parts, 1):
                name = f"{what} of number {number}" if len(parts) > 1 else what
                found[name] = text_of(part.part)
                if functions := list(map(_traced, _functions(part.part))):
                    found[f"the schedule of {name}"] = ", ".join(functions)
                found[f"the leaves of {name}"] = ", ".join(part.paths)
                if inside := getattr(part, "inside", ()):
                    found[f"what is around {name}"] = text_of(inside)
                for bucket in getattr(part, "buckets", ()):
                    how = f"{text_of(bucket.scheme)} of units {[*bucket.shape]}"
                    found[f"how {bucket.name!r} is summed"] = how
        if seen.memories:
            found["how residuals are kept"] = text_of(seen.memories)
        self.say("transformation", found)
        self.say("numbers", {f"{k} in the update of tx": v for k, v in numbers.items()})
        self.say("flow", {"the order of operations in the update of tx": f"of hash {flow}"})


def _functions(value: Any) -> Iterator[Any]:
    """Yields the functions among the options of a part, such as schedules of densities."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = tuple(getattr(value, field.name) for field in dataclasses.fields(value))
    if isinstance(value, tuple | list):
        for one in value:
            yield from _functions(one)
    elif callable(value) and not isinstance(value, type):
        yield value


def _traced(function: Any) -> str:
    """Returns a hash of a function of the step, as text; "" for another function."""
    try:
        return f"of hash {flow_of(jax.make_jaxpr(function)(jnp.int32(0)))}"
    except Exception:  # it takes other arguments
        return ""


def _kind(leaf: Any) -> str:
    """Returns the dtype that JAX gives a leaf, and its shape, as text."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.extended):
        dtype = jax.dtypes.canonicalize_dtype(jnp.result_type(leaf))
    return f"{dtype}{[*np.shape(leaf)]}"
