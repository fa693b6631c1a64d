"""The trainer: its step, its evaluation, and its first state."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from sparsejax import axes, rows
from sparsejax.axes import AxisName
from sparsejax.errors import ArgumentError
from sparsejax.training import (
    halves,
    losses,
    outputs,
    placing,
    variables as of_variables,
)
from sparsejax.training.by_rows import (
    bounded,
    caught_up,
    only,
    reader,
    scaled,
    takes_rows,
    updated,
    weighted,
)
from sparsejax.training.losses import Loss
from sparsejax.training.shares import Share
from sparsejax.training.train_state import (
    TrainState,
    check_key,
    require_synchronized,
    require_usable,
)
from sparsejax.transforms.state import observing, placed, specs
from sparsejax.transforms.state.per_rank import check_ranks, check_whole
from sparsejax.wire import Wire


class DataParallel:
    """See `data_parallel`."""

    def __init__(
        self,
        loss_fn,
        tx,
        mesh,
        axis_name,
        *,
        has_aux,
        ids,
        param_specs,
        aux,
        variables,
        weight,
        eval_fn,
        donate,
        capacity,
    ):
        if not isinstance(tx, optax.GradientTransformation) or not isinstance(mesh, Mesh):
            raise ArgumentError(
                "sparsejax.data_parallel(loss_fn, tx, mesh) takes an optax transformation, "
                "such as optax.chain(sparsejax.zen_sync(), optax.adam(1e-3)), and a "
                f"jax.sharding.Mesh, got a {type(tx).__name__} and a {type(mesh).__name__}."
            )
        losses.check_functions(
            {"loss_fn": loss_fn}, {"ids": ids, "weight": weight, "eval_fn": eval_fn}
        )
        if has_aux:
            outputs.check(aux)
        of_variables.check(variables)
        self._loss = Loss(loss_fn, "loss_fn", has_aux)
        self._eval = self._loss if eval_fn is None else Loss(eval_fn, "eval_fn", has_aux)
        self._tx = optax.with_extra_args_support(tx)
        self._mesh = mesh
        self._axis_name = specs.data_axis(mesh, axis_name, "sparsejax.data_parallel")
        self._ranks = specs.ranks_of(mesh, self._axis_name)
        self._batches = placing.Batches(mesh, self._axis_name)
        self._has_aux = has_aux
        self._aux = aux
        self._variables = variables
        self._weight = weight
        self._ids = ids
        self._param_specs = param_specs
        self._donate = donate
        self._capacity = None if capacity is None else rows.check_capacity(capacity)
        self._compiled: dict[Any, Any] = {}
        self._last_step: jax.Array | None = None

    def init(
        self, params: Any, *, variables: Any = None, key: jax.Array | None = None
    ) -> TrainState:
        """The first state; what it is made from is copied, not taken over.

        Args:
            params: The parameters. Several processes give equal ones.
            variables: What `loss_fn` changes and no gradient trains: one tree of arrays,
                the same for all ranks at first. Given to `loss_fn` as `variables`.
            key: A PRNG key, from which `loss_fn` is given one for each rank and step.
        """
        check_key(key)
        specs.check_shards(params, self._mesh)
        same = PartitionSpec()
        own = self._specs_of(params)
        given = {"params": params, "variables": variables, "key": key}
        wanted = jax.tree.map(lambda _: same, given) | {"params": own}
        given = placing.alike(given, self._mesh, wanted, "trainer.init")
        params, variables, key = given["params"], given["variables"], given["key"]
        wrapped = of_variables.wrapped(variables, self._variables, self._axis_name)

        # Through shard_map, so that the first step sees what all later ones will see.
        def copy(params, step, variables, key):
            wire = Wire(self._axis_name)
            params, step, key = jax.tree.map(of_variables.copied, (params, step, key))
            return params, step, of_variables.first(variables, wire), key

        copy = jax.shard_map(
            copy,
            mesh=self._mesh,
            in_specs=(own, same, same, same),
            out_specs=(own, same, specs.state_specs(wrapped), same),
        )
        params, step, variables, key = jax.jit(copy)(params, jnp.int32(0), wrapped, key)
        opt_state = placed.init(
            self._tx, params, self._mesh, self._axis_name, param_specs=self._param_specs
        )
        return TrainState(step, params, opt_state, variables, key)

    def _specs_of(self, params):
        given = PartitionSpec() if self._param_specs is None else self._param_specs
        return specs.full_specs(params, given)

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        """One step. The state given is used up, unless the trainer has `donate=False`.

        Args:
            state: From `init` or from the last step.
            batch: A tree of arrays, the ranks' shares one after another along the leading
                axis. Of several processes each gives the shares of its own ranks, all of
                the same length; or a global `jax.Array`.

        Returns:
            The next state, and the loss averaged over ranks; with auxiliary outputs, the
            loss and these.
        """
        require_usable(state, "trainer.step")
        if state.step is not self._last_step:
            # Not one that the last step returned, but restored, perhaps.
            check_whole(state)
            state = self._placed(state)
        after, out = self.compiled(state)(state, self._batches.placed(batch))
        self._last_step = after.step
        return after, out

    def _placed(self, state):
        """A state on the mesh, as a step returns it, so that nothing is compiled twice."""
        specs = self._whole_specs(state)
        there = lambda x, spec: placing.is_placed(x, self._mesh, spec)
        if all(jax.tree.leaves(jax.tree.map(there, state, specs))):
            return state
        copy = jax.shard_map(
            lambda state: state, mesh=self._mesh, in_specs=(specs,), out_specs=specs
        )
        return jax.jit(copy)(placing.alike(state, self._mesh, specs, "trainer.step"))

    def evaluate(self, state: TrainState, batch: Any) -> Any:
        """The loss on a batch, without gradient or optimizer; the state is left as it is.

        Calls `eval_fn`, or `loss_fn` if there is none, as a step would. The variables that
        it returns are dropped, and `opt_state` may be anything, None for instance.

        Args:
            state: From `init` or from a step.
            batch: As for `step`.

        Returns:
            The loss averaged over ranks; with auxiliary outputs, the loss and these.
        """
        require_usable(state, "trainer.evaluate")
        # Without what is not needed: the optimizer's state may be larger than all else.
        if not halves.has_two(self._tx) and not self._has_late_rows(state.params):
            state = state._replace(opt_state=None)
        return self._evaluation(state)(state, self._batches.placed(batch))

    def flush(self, state: TrainState) -> TrainState:
        """Applies what is carried into the next step; uses the state up as a step does."""
        require_usable(state, "trainer.flush")
        key = "flush", jax.tree.structure(state)
        if key not in self._compiled:
            known = self._mesh, self._whole_specs(state), self._donate
            self._compiled[key] = halves.flusher(self._tx, *known)
        params, opt_state = self._compiled[key](state.params, state.opt_state)
        return state._replace(params=params, opt_state=opt_state)

    def compiled(self, state: TrainState) -> Any:
        """The jitted step, for `lower` and `compile`; one for each structure of state."""
        check_ranks(state.opt_state, self._ranks, inside=False)
        of_variables.check_ranks(state.variables, self._ranks)
        key = "step", jax.tree.structure(state)
        if key not in self._compiled:
            whole = self._whole_specs(state)

            def step(state, batch):
                return self._local_step(state, batch, whole.opt_state)

            mapped = self._on_ranks(step, whole, (whole, self._output_specs()))
            self._compiled[key] = jax.jit(mapped, donate_argnums=0 if self._donate else ())
        return self._compiled[key]

    def _has_late_rows(self, params):
        """Whether the optimizer's state says what rows of the parameters are."""
        key = "late", jax.tree.structure(params)
        if key not in self._compiled:
            self._compiled[key] = bool(observing.observed(self._tx, params).rows)
        return self._compiled[key]

    def _evaluation(self, state):
        """The jitted evaluation, one for each structure of state."""
        of_variables.check_ranks(state.variables, self._ranks)
        key = "evaluate", jax.tree.structure(state)
        if key not in self._compiled:
            known = self._whole_specs(state), self._output_specs()
            self._compiled[key] = jax.jit(self._on_ranks(self._local_evaluation, *known))
        return self._compiled[key]

    def _on_ranks(self, local, state_specs, out_specs):
        """A function of this rank's state and share of a batch, on all ranks."""
        in_specs = (state_specs, PartitionSpec(self._axis_name))
        return jax.shard_map(local, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs)

    def _output_specs(self):
        loss = PartitionSpec()
        return (loss, outputs.specs(self._aux, self._axis_name)) if self._has_aux else loss

    def _whole_specs(self, state) -> Any:
        own = self._specs_of(state.params)
        known = (state.params, own) if self._param_specs is not None else ()
        opt_state = specs.state_specs(state.opt_state, *known)
        rest = specs.state_specs(state._replace(params=None, opt_state=None))
        return rest._replace(params=own, opt_state=opt_state)

    def _local_step(self, state, batch, opt_specs):
        wire = Wire(self._axis_name)
        share = Share.of(batch, self._weight, wire)
        given = of_variables.keywords(state, wire)
        loss_fn = lambda params: self._loss(weighted(params, share), batch, given)
        before = halves.begun(self._tx, state.params, state.opt_state, loss_fn)
        params = axes.local(before[0], wire.axis)
        seen = observing.observed(self._tx, params)
        by_rows, read = takes_rows(seen), reader(seen, params, halves.of_rest(before[1]))
        value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)
        if by_rows or read is not None:
            value_and_grad = rows.value_and_grad(loss_fn, has_aux=True, read=read)
        (loss, (aux, new)), grads = value_and_grad(params)
        grads = scaled(only(grads, by_rows), share)
        extra = {"ids": self._ids(batch)} if self._ids else {}

        def update(grads, params, opt_state):
            updates, opt_state = updated(self._tx, grads, opt_state, params, extra)
            names = frozenset(axes.axis_names(wire.axis))
            require_synchronized(updates, opt_state, opt_specs, names)
            return rows.apply_updates(params, updates), opt_state

        if self._capacity is not None:
            update = bounded(update, self._capacity, wire.axis)
        params, opt_state = update(grads, *before)
        variables = state.variables
        if variables is not None:
            variables = of_variables.merged(variables, new, share)
        after = TrainState(state.step + 1, params, opt_state, variables, state.key)
        return after, self._of_all(loss, aux, share)

    def _local_evaluation(self, state, batch):
        wire = Wire(self._axis_name)
        share = Share.of(batch, self._weight, wire)
        seen = observing.observed(self._tx, state.params)
        late = halves.applied(self._tx, state.params, state.opt_state)
        params = axes.local(caught_up(seen, *late), wire.axis)
        loss, (aux, _) = self._eval(params, batch, of_variables.keywords(state, wire))
        return self._of_all(loss, aux, share)

    def _of_all(self, loss, aux, share):
        """The loss of all ranks, and the auxiliary outputs."""
        share.require_same_elsewhere("what loss_fn returns", loss)
        loss = share.mean(loss)
        if not self._has_aux:
            return loss
        return loss, outputs.put_together(aux, self._aux, share)


def data_parallel(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    axis_name: AxisName | None = None,
    has_aux: bool = False,
    ids: Callable[[Any], dict[str, jax.Array]] | None = None,
    param_specs: Any = None,
    aux: Any = None,
    variables: Any = "mean",
    weight: Callable[[Any], Any] | None = None,
    eval_fn: Callable[..., Any] | None = None,
    donate: bool = True,
    capacity: rows.Capacity | None = None,
) -> DataParallel:
    """Makes a train step that runs on every device of a mesh axis.

    Example:
        >>> tx = optax.chain(sparsejax.zen_sync(), optax.adam(1e-3))
        >>> trainer = sparsejax.data_parallel(loss_fn, tx, mesh)
        >>> state = trainer.init(params)
        >>> for batch in batches:
        ...     state, loss = trainer.step(state, batch)

        With dropout and batch statistics:

        >>> def loss_fn(params, batch, *, variables, key, train=True):
        ...     logits, variables = model(params, batch, variables, key, train)
        ...     loss = optax.squared_error(logits, batch["y"]).mean()
        ...     return loss, ({"logits": logits}, variables)
        >>> eval_fn = functools.partial(loss_fn, train=False)
        >>> trainer = sparsejax.data_parallel(
        ...     loss_fn, tx, mesh, aux="stack", eval_fn=eval_fn)
        >>> state = trainer.init(params, variables=statistics, key=jax.random.key(0))
        >>> state, (loss, aux) = trainer.step(state, batch)
        >>> loss, aux = trainer.evaluate(state, batch)

    A batch is a tree of arrays, split over the ranks along their leading axis. In a job of
    several processes each gives its own part of it, as NumPy arrays: the shares of the
    ranks that it has, equally long on all processes. All call `step` equally often; one
    that has run out of data gives zeros and `weight` 0.

    Args:
        loss_fn: From parameters and this rank's share of a batch to the mean loss over
            that share. It is given `variables=` and `key=`, another key on each rank and in
            each step, where the state was made with them, and returns the loss; with
            auxiliary outputs (loss, aux), with variables (loss, variables), with both
            (loss, (aux, variables)).
        tx: The optimizer, a sparsejax synchronization in front of it. Tables that it
            updates by rows, as `sparsejax.lazy` does, are differentiated by rows
            (`sparsejax.value_and_grad`). Rows of `state.params` may then be late:
            `evaluate` and the next step read them as they would be, and
            `sparsejax.rows.settle` catches them up.
        mesh: The mesh.
        axis_name: The axis over which the batch is split, where the mesh has several.
        has_aux: Whether `loss_fn` returns auxiliary outputs. Those are scalars, which are
            averaged, unless `aux` says otherwise.
        ids: From a batch to the rows that it touches, {path: ids}, so that gradients need
            not be searched for them; see `sparsejax.sync`.
        param_specs: The parameters' PartitionSpecs, where a further axis of the mesh shards
            them: a tree like the parameters, or a prefix of it. `loss_fn` is then given
            shards, and the same share of the batch on each of that axis; it may send over
            that axis, and its loss is to be the same there.
        aux: What becomes of the auxiliary outputs, which it says there are: "mean" over
            ranks, "sum", or "stack", the ranks' arrays one after another along the leading
            axis, and scalars as [ranks]; or a tree of these, or a prefix of one. What is
            stacked is an array sharded over the ranks.
        variables: What becomes of the variables: "mean" over ranks (integers must be equal
            on all), or "by_rank"; or a tree of these, or a prefix of one. The mean of
            variances is not the variance of the whole batch.
        weight: From a rank's share of a batch to how much it counts in the means, such as
            the number of examples that are there, if shares are filled up. The gradient is
            then sum(weight * gradient) / sum(weight), where `tx` averages. A rank whose
            weight is 0 does not count, whatever its loss is; if all are 0, the gradient
            is 0 and the loss NaN. Sums leave such ranks out, and know no weights else; what
            is stacked holds what shares were filled up with. With a weight below 0 the
            loss is NaN.
        eval_fn: What `evaluate` calls, as `loss_fn` is called; `loss_fn` itself if None.
        donate: Whether a step uses up the state that it is given, and reuses its memory.
        capacity: How many distinct rows of a table a rank reads in a step, as a rule, or
            {pattern of paths: number}, where that is far below the number of ids: a step
            whose rows fit takes less time, one whose rows do not is the same, only slower.
            See `sparsejax.rows.within_capacity`.

    Returns:
        An object with `init(params, variables=None, key=None)`, `step(state, batch)`,
        `evaluate(state, batch)`, `flush(state)`. The state is a `sparsejax.TrainState`.
    """
    if aux is None and has_aux:
        aux = outputs.SCALARS
    return DataParallel(
        loss_fn,
        tx,
        mesh,
        axis_name,
        has_aux=aux is not None,
        ids=ids,
        param_specs=param_specs,
        aux=aux,
        variables=variables,
        weight=weight,
        eval_fn=eval_fn,
        donate=donate,
        capacity=capacity,
    )
