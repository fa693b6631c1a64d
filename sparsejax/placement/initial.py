"""Makes states on a mesh: first states, `init` for frameworks, and targets to restore into.

State by rank depends on the ranks, so a state is made inside `shard_map` on the mesh on
which it will be used, with its final shardings: then the first step compiles for all later
ones, too. `bind` does so for libraries such as flax that call `tx.init` themselves.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from sparsejax import arguments, axes as mesh_axes
from sparsejax.axes import AxisName
from sparsejax.errors import AxisError
from sparsejax.placement import chains, flow, in_place, program, setup
from sparsejax.placement.setup import Setup
from sparsejax.placement.specs import (
    check_shards,
    check_types,
    data_axis,
    places,
    state_specs,
)
from sparsejax.state import observing, sharded, tree
from sparsejax.state.parameters import ParameterSpecs, ranks_of
from sparsejax.transforms.described import described


def init(
    tx: optax.GradientTransformation,
    params: Any,
    mesh: Mesh | None = None,
    axis_name: AxisName | None = None,
    *,
    param_specs: Any = None,
    check_vma: bool = True,
    timeout: float | None = setup.TIMEOUT,
) -> Any:
    """Makes the state of an optimizer on a mesh.

    State by rank is sharded, and the rest is replicated. The function is needed if a
    transformation keeps state by rank, such as a residual, and is correct for every other
    one. In a job of several processes the processes of the mesh first compare what they are
    about to train: versions, parameters, mesh and transformation. If something differs, all
    raise.

    Args:
        tx: The optimizer.
        params: The parameters, replicated over the axis of the ranks.
        mesh: The mesh to train on. None where `update` is called under `jit`: the mesh and
            the shardings are then those of the parameters, and the axis is that of the
            transformation.
        axis_name: The mesh axis of the ranks, where the mesh has several axes.
        param_specs: The parameters' PartitionSpecs, where `update` runs on shards of the
            parameters inside `shard_map`: a tree like the parameters, or a prefix of it.
            Without them `update` runs on whole parameters. If their arrays are sharded over
            other axes of the mesh, which XLA manages, arrays of the state with a
            parameter's path and shape are sharded like it.
        check_vma: The `check_vma` of the `shard_map` in which `update` will run. With
            `param_specs`, leaves are put together by the types that it checks.
        timeout: Seconds to wait for the other processes of the mesh. `math.inf` waits
            without limit, and None compares nothing.

    Returns:
        The state. Pass it to `shard_map` with `state_specs(state)`, or with
        `state_specs(state, params, param_specs)` if these were given.

    Raises:
        ArgumentError: An argument cannot be used, or parameters are sharded over the ranks.
        AxisError: The mesh does not have the axis, or has several and none is named.
        LeafError: A leaf to be synchronized is not a floating-point array.
        RuleError: A rule of `tx` matches no leaf, or has no effect.
        PlanError: A plan was made for other parameters, or another number of ranks.
        StateError: State of `tx` that is replicated would differ by rank.
        JobError: Processes are about to train different models, or one does not answer.

    Example:
        >>> tx = optax.chain(sparsejax.dgc(0.01), sparsejax.zen_sync(), optax.sgd(0.1))
        >>> opt_state = sparsejax.init(tx, params, mesh)
        >>> specs = sparsejax.state_specs(opt_state)

    See Also:
        `sparsejax.bind`: a transformation whose `init` does this.
        `sparsejax.abstract_state`: the shapes and placements alone.
        `sparsejax.state_specs`: the PartitionSpecs of the state.
    """
    given, own_specs = params, None
    if mesh is None:
        mesh, axis_name, own_specs = in_place.of_arrays(tx, params, axis_name)
        given = jax.tree.map(in_place.whole, params)
        param_specs, check_vma = None, False
    axis_name = data_axis(mesh, axis_name, "sparsejax.init")
    job = Setup("sparsejax.init", mesh, timeout, params)
    with job.made_ready():
        maker = Maker.of(tx, given, mesh, axis_name, param_specs, check_vma)
        if given is not params:
            maker = dataclasses.replace(maker, of_params=own_specs)
        maker.tell(job, tx, given, mesh, axis_name)
    return maker.make(params) if given is params else in_place.made(tx, params, mesh)


@dataclasses.dataclass(frozen=True, eq=False)
class Maker:
    """Makes a state on a mesh.

    Attributes:
        make: A function from parameters, on any devices, to the state on the mesh.
        mesh: The mesh.
        params: The parameters' shapes, dtypes and shardings.
        places: The PartitionSpecs of the state on the mesh.
        of_params: The PartitionSpecs of the parameters on the mesh.
        update: The traced program of an update, without sums: see `chains.check_chain`.
    """

    make: Callable[[Any], Any]
    mesh: Mesh | AbstractMesh
    params: Any
    places: Any
    of_params: Any
    update: Any

    @classmethod
    def of(
        cls,
        tx: optax.GradientTransformation,
        params: Any,
        mesh: Mesh | AbstractMesh,
        axis_name: AxisName,
        param_specs: Any = None,
        check_vma: bool = True,
    ) -> "Maker":
        """Traces `init`; raises if parameters, chain and mesh do not fit together."""
        check_shards(params, mesh)
        known = ParameterSpecs.of(
            params, PartitionSpec() if param_specs is None else param_specs
        )
        known.check(mesh, axis_name)
        arrays = (
            known if param_specs is not None else ParameterSpecs.of_arrays(params, mesh)
        )
        arrays.check_arrays(axis_name, "sparsejax.init")
        whole = outline(params, mesh, known.tree)
        update = chains.check_chain(tx, whole, mesh, axis_name, known.tree)
        options = {"mesh": mesh, "in_specs": (known.tree,), "check_vma": check_vma}
        further = arrays.axes - known.axes
        of_arrays = arrays if further else None
        by_rank, lies = _specs_of(tx, whole, options, param_specs, of_arrays)
        options |= {"out_specs": by_rank}
        make = jax.jit(on_ranks(tx.init, **options))
        if further:
            make = _of_whole(tx.init, options, further, lies)
        given = outline(params, mesh, arrays.tree)
        return cls(make, mesh, given, lies, arrays.tree, update)

    def shapes(self) -> Any:
        """Returns the shapes, dtypes and shardings of the state."""
        return outline(jax.eval_shape(self.make, self.params), self.mesh, self.places)

    def tell(
        self,
        job: Setup,
        tx: optax.GradientTransformation,
        params: Any,
        mesh: Mesh,
        axis_name: AxisName,
    ) -> None:
        """Adds mesh, parameters and transformation to the values that processes compare."""
        if job.is_shared:
            job.say_mesh(mesh, axis_name)
            job.say_tree("parameters", "the parameter", params, self.of_params)
            numbers, order = program.numbers_of(self.update), flow.flow_of(self.update)
            job.say_transformation(tx, params, numbers, order)


def on_ranks(
    function: Callable[..., Any],
    *,
    mesh: Mesh | AbstractMesh,
    in_specs: tuple[Any, ...],
    **options: Any,
) -> Callable[..., Any]:
    """Returns `jax.shard_map` for operands of any sharding, to be called inside `jax.jit`.

    On Explicit axes JAX raises if the sharding of an operand differs from its spec, with a
    message about a `shard_map` that the user did not write. So operands are moved first.
    """
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, **options)
    if not isinstance(mesh, Mesh) or AxisType.Explicit not in mesh.axis_types:
        return mapped
    is_spec = lambda node: isinstance(node, PartitionSpec)
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))

    @functools.wraps(mapped)  # programs are named after it
    def run(*operands):
        specs = jax.tree.broadcast(in_specs, operands, is_leaf=is_spec)
        return mapped(*jax.tree.map(put, operands, specs))

    return run


def _specs_of(tx, params, options, param_specs, arrays):
    """Returns the PartitionSpecs of a state for `shard_map`, and those on the mesh.

    They are the same unless parameters are sharded over axes that are not manual in the
    `shard_map` of `update`.
    """
    found = []

    def structure(params):
        state = tx.init(params)
        if param_specs is None:
            found.append(state_specs(state))
        else:
            found.append(state_specs(state, params, param_specs))
            check_types(state, found[0])
        found.append(found[0] if arrays is None else places(state, arrays))
        return jnp.zeros(())

    jax.eval_shape(jax.shard_map(structure, **options, out_specs=PartitionSpec()), params)
    return found


def _of_whole(init, options, further, lies):
    """Returns `init` of whole parameters whose arrays are sharded over further axes.

    The state is sharded like them. XLA manages the further axes, which are made Auto: on
    Explicit axes JAX would gather the arrays at the start of a `shard_map`. A mesh without
    Explicit axes is not made abstract, because JAX 0.12 would then gather them.
    """
    mesh = options["mesh"]
    manual = frozenset(mesh.axis_names) - further
    if AxisType.Explicit in mesh.axis_types:
        kinds = dict.fromkeys(mesh.axis_names, AxisType.Auto)
        options = options | {"mesh": mesh.abstract_mesh.update_axis_types(kinds)}
    mapped = jax.shard_map(init, **options, axis_names=manual)
    if AxisType.Explicit in mesh.axis_types:
        mapped = jax.sharding.auto_axes(mapped, axes=mesh.axis_names, out_sharding=lies)
    there = jax.tree.map(lambda spec: NamedSharding(mesh, spec), lies)
    return jax.jit(mapped, out_shardings=there)


def outline(given: Any, mesh: Mesh | AbstractMesh, wanted: Any) -> Any:
    """Returns the shapes, dtypes and shardings that a tree will have on a mesh.

    Leaves that are neither arrays nor numbers are returned unchanged.

    Args:
        given: A tree of arrays, or of numbers.
        mesh: The mesh.
        wanted: The `PartitionSpec` of each leaf.
    """

    def one(x, spec):
        if not (hasattr(x, "dtype") or isinstance(x, bool | int | float | complex)):
            return x
        dtype = jnp.result_type(x)
        if not jnp.issubdtype(dtype, jax.dtypes.extended):
            dtype = jax.dtypes.canonicalize_dtype(dtype)
        return jax.ShapeDtypeStruct(np.shape(x), dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(one, given, wanted)


@described
def bind(
    tx: optax.GradientTransformation,
    mesh: Mesh,
    axis_name: AxisName | None = None,
    *,
    param_specs: Any = None,
    check_vma: bool = True,
    timeout: float | None = setup.TIMEOUT,
) -> optax.GradientTransformationExtraArgs:
    """Returns the same transformation, whose `init` does what `sparsejax.init` does.

    It is for libraries that call `tx.init` themselves: `TrainState.create` of flax,
    `nnx.Optimizer`, trainers. Its `update` is that of `tx`, and runs on that mesh, inside
    `shard_map`, or under `jit` where parameters are replicated. Under `jit` with sharded
    parameters pass `sparsejax.init(tx, params)`, without a mesh, for `init` instead. The
    new `init` raises the errors of `sparsejax.init`.

    Args:
        tx: The optimizer, with the synchronization in it.
        mesh: The mesh to train on.
        axis_name: The mesh axis of the ranks, where the mesh has several axes.
        param_specs: See `sparsejax.init`.
        check_vma: See `sparsejax.init`.
        timeout: See `sparsejax.init`.

    Returns:
        An `optax.GradientTransformationExtraArgs`.

    Raises:
        ArgumentError: `tx` is not a transformation, or `mesh` is not a mesh.
        AxisError: The mesh does not have the axis, or has several and none is named.

    Example:
        >>> tx = optax.chain(sparsejax.dgc(0.01), sparsejax.zen_sync(), optax.adam(1e-3))
        >>> optimizer = nnx.Optimizer(model, sparsejax.bind(tx, mesh), wrt=nnx.Param)

    See Also:
        `sparsejax.init`: makes the state itself.
        `sparsejax.abstract_state`: the shapes and placements alone.
    """
    tree.check_transformation(tx, ())
    tx = optax.with_extra_args_support(tx)
    axis_name = data_axis(mesh, axis_name, "sparsejax.bind")

    def bound(params):
        on_ranks = set(mesh_axes.axis_names(axis_name)) & set(mesh_axes.manual_axes())
        if on_ranks or observing.is_observing():
            return tx.init(params)
        return init(
            tx,
            params,
            mesh,
            axis_name,
            param_specs=param_specs,
            check_vma=check_vma,
            timeout=timeout,
        )

    return optax.GradientTransformationExtraArgs(bound, tx.update)


def abstract_state(
    tx: optax.GradientTransformation,
    params: Any,
    mesh: Mesh,
    axis_name: AxisName | None = None,
    *,
    ranks: int | None = None,
    param_specs: Any = None,
    check_vma: bool = True,
) -> Any:
    """Returns shapes, dtypes and shardings of a state, as a target for orbax's restore.

    Checkpoints of `sparsejax.save` are read by `sparsejax.restore`, without such a target.

    Args:
        tx: The optimizer that made the state.
        params: The parameters, or anything with their shapes and dtypes.
        mesh: The mesh to train on from now on.
        axis_name: The mesh axis of the ranks, where the mesh has several axes.
        ranks: The number of ranks that the state was saved by; that of the mesh if None.
        param_specs: See `sparsejax.init`.
        check_vma: See `sparsejax.init`.

    Returns:
        A tree of `jax.ShapeDtypeStruct`. For the number of ranks of the mesh, each has the
        sharding that `sparsejax.init` gives it. For another number, all are replicated, as
        `sparsejax.resized` needs them.

    Example:
        >>> target = sparsejax.abstract_state(tx, params, mesh, ranks=8)  # saved by eight
        >>> state = checkpointer.restore(path, target)
        >>> state = sparsejax.resized(state, like=sparsejax.init(tx, params, mesh))

    See Also:
        `sparsejax.init`: makes the state itself.
        `sparsejax.bind`: a transformation whose `init` does that.
        `sparsejax.restore`: reads a checkpoint without a target.
        `sparsejax.save`: writes a checkpoint.
        `sparsejax.resized`: changes the number of ranks of a state.
    """
    axis_name = data_axis(mesh, axis_name, "sparsejax.abstract_state")
    made_for = mesh
    if ranks is not None:
        arguments.check_whole("ranks", ranks, 1)
    if ranks not in (None, ranks_of(mesh, axis_name)):
        made_for = _mesh_of(mesh, axis_name, ranks)
        shards = sharded.apart(params)
        nodes = [node.for_ranks(ranks) for node in shards.nodes]
        params = shards.together(shards.rest, nodes)
    maker = Maker.of(tx, params, made_for, axis_name, param_specs, check_vma)
    shapes = maker.shapes()
    if made_for is mesh:
        return shapes
    return outline(shapes, mesh, jax.tree.map(lambda _: PartitionSpec(), shapes))


def _mesh_of(mesh, axis_name, ranks):
    """Returns an abstract mesh like another one, with `ranks` ranks along its axes."""
    outer, *inner = mesh_axes.axis_names(axis_name)
    inside = ranks_of(mesh, tuple(inner))
    if ranks % inside:
        raise AxisError(
            f"sparsejax.abstract_state: ranks={ranks} is no multiple of the {inside} along "
            f"{inner}; a state of another number there cannot be restored on this mesh."
        )
    sizes = {**mesh.shape, outer: ranks // inside}
    names = tuple(sizes)
    return AbstractMesh(tuple(sizes.values()), names, axis_types=mesh.axis_types)
