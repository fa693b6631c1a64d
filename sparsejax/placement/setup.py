"""What a process is about to train, said to the others before its first collective.

Processes that set out with different things compile different programs, and wait for one
another in collectives that never meet; or they meet, and replicas diverge. So whatever
makes a state on a mesh lets the processes of that mesh compare: versions and settings, the
mesh, the tree of parameters, the transformation with its options, and what its update
computes with. Nothing of it is sent by devices: see `jobs.agreement`. In one process
nothing is asked.
"""

import contextlib
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
from sparsejax.jobs.texts import text_of
from sparsejax.state import observing, sharded, tree


TIMEOUT = 300.0  # seconds; hosts may read their data before

_SAME = "Give all processes the same"
_FIXES = {
    "versions": "Install the same on all hosts.",
    "settings": "Set the same on all hosts.",
    "mesh": f"{_SAME} mesh, of all devices in one order.",
    "parameters": f"{_SAME} model.",
    "variables": f"{_SAME} variables.",
    "transformation": f"{_SAME} optimizer, rules and plan.",
    "numbers": f"{_SAME} optimizer, with the same learning rate and options.",
    "trainer": f"{_SAME} arguments of sparsejax.data_parallel and trainer.init.",
}


class Setup:
    """What the processes of a mesh are to agree on before one of them sends anything.

    Attributes:
        topics: What this process says, filled while it makes ready.
    """

    topics: dict[str, dict[str, str]]

    def __init__(self, call: str, mesh: Any, timeout: float | None, given: Any = None):
        """Asks nobody yet.

        Args:
            call: Who makes a state, as the user knows it.
            mesh: The mesh on which it is made.
            timeout: Seconds to wait for the other processes; None asks nobody.
            given: What it is made of; where that is being traced nothing is made yet, and
                nothing asked.
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
        """Whether there is another process to agree with."""
        return len(self._processes) > 1

    @contextlib.contextmanager
    def made_ready(self) -> Iterator[None]:
        """Compares what the block around has filled in, at its end.

        Where the block raises the others hear of it, so that they do not wait.

        Raises:
            JobError: On all processes, with what differs and who has what.
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
                pass  # Some do not come; this one has something else to tell.
            raise
        if wrong := self._disagreements(""):
            raise JobError(
                f"{self._call}: the processes of this job are not about to train the same:"
                "\n" + "\n".join(f"* {one}" for one in wrong)
            )

    def _disagreements(self, why):
        what = f"what it gives {self._call}"
        topics = {
            "versions": versions.versions(),
            "settings": versions.settings(),
            **self.topics,
        }
        return agreement.disagreements(
            what, topics, _FIXES, self._processes, self._timeout, why
        )

    def say(self, topic: str, values: Mapping[str, Any]) -> None:
        """Adds values, by name, to what this process says about a topic."""
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
        """Adds the paths, shapes and dtypes of a tree, and how it is sharded.

        Args:
            topic: Where it belongs.
            what: What its leaves are, in words.
            given: The tree.
            specs: A PartitionSpec for each leaf; None where it is replicated.
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
            # Its type, and what is no array: the columns that it has, and its axis.
            found[f"the table {path!r}"] = str(jax.tree.structure(node))
        self.say(topic, found)

    def say_transformation(
        self, tx: optax.GradientTransformation, params: Any, numbers: Mapping[str, str]
    ) -> None:
        """Adds the parts of a chain with their options, and with what it computes.

        Args:
            tx: The chain.
            params: The parameters, or their shapes and dtypes.
            numbers: Of its update, as `program.numbers_of` has them.
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
                found[f"the leaves of {name}"] = ", ".join(part.paths)
                if inside := getattr(part, "inside", ()):
                    found[f"what is around {name}"] = text_of(inside)
                for bucket in getattr(part, "buckets", ()):
                    how = f"{text_of(bucket.scheme)} of units {[*bucket.shape]}"
                    found[f"how {bucket.name!r} is summed"] = how
        self.say("transformation", found)
        self.say("numbers", {f"{k} in the update of tx": v for k, v in numbers.items()})


def _kind(leaf: Any) -> str:
    """The dtype that JAX gives a leaf, and its shape."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.extended):
        dtype = jax.dtypes.canonicalize_dtype(jnp.result_type(leaf))
    return f"{dtype}{[*np.shape(leaf)]}"
