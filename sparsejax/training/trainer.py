"""The trainer: its step, its evaluation, and its first state; see `data_parallel`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from sparsejax import rows
from sparsejax.errors import ArgumentError
from sparsejax.jobs import background
from sparsejax.placement import initial, specs
from sparsejax.placement.setup import TIMEOUT, Setup
from sparsejax.rounds import Overlap
from sparsejax.state import observing, tree
from sparsejax.state.per_rank import check_ranks, check_whole
from sparsejax.training import ahead, numbers, placing, variables as of_variables
from sparsejax.training.on_rank import asked, halves, losses, outputs
from sparsejax.training.on_rank.by_rows import takes_rows
from sparsejax.training.on_rank.losses import Loss
from sparsejax.training.on_rank.program import Program, check_sends_nothing
from sparsejax.training.train_state import (
    Checked,
    TrainState,
    check_key,
    require_not_traced,
    require_opt_state,
    require_usable,
)
from sparsejax.wire.collectives import Wire


class DataParallel:
    """A train step over a mesh: the result of `sparsejax.data_parallel`.

    Its methods are those of a training loop: `init` once, `step` for each batch, `evaluate`
    for a loss without an update, and `flush` before parameters are read otherwise.

    Example:
        >>> trainer = sparsejax.data_parallel(loss_fn, tx, mesh)
        >>> isinstance(trainer, sparsejax.training.DataParallel)
        True
    """

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
        check_every,
        check_vma,
        overlap,
    ):
        if isinstance(tx, optax.MultiSteps):
            tree.check_transformation(tx, ())
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
        if param_specs is not None and not check_vma:
            raise ArgumentError(
                "data_parallel: check_vma=False was given with param_specs: without the "
                "check JAX does not know what the further axis of the mesh replicates, and "
                "its gradient would be that of one rank there. Leave check_vma out, and "
                "make what a scan carries local, sparsejax.local(zeros); or write a "
                "shard_map of your own."
            )
        loss = Loss(loss_fn, "loss_fn", has_aux)
        eval_loss = loss if eval_fn is None else Loss(eval_fn, "eval_fn", has_aux)
        self._mesh = mesh
        self._axis_name = specs.data_axis(mesh, axis_name, "sparsejax.data_parallel")
        self._tx = optax.with_extra_args_support(tx)
        self._overlap = Overlap(tx, mesh) if overlap else None
        self._ranks = specs.ranks_of(mesh, self._axis_name)
        self._batches = placing.Batches(mesh, self._axis_name)
        self._variables = variables
        self._param_specs = param_specs
        self._check_vma = check_vma
        self._donate = donate
        self._capacity = None if capacity is None else rows.check_capacity(capacity)
        of = self._axis_name, loss, eval_loss, aux, weight, ids, self._capacity
        self._program = Program(self._tx, *of)
        # A step with overlap sends nothing; an evaluation does.
        self._step_program = self._program
        if self._overlap:
            check_sends_nothing(aux, weight)
            steps = self._overlap.steps
            self._step_program = Program(steps, *of, mean_loss=False)
        self._options = {"aux": aux, "variables": variables, "capacity": self._capacity}
        self._options |= {"weight": weight is not None, "ids": ids is not None}
        self._options |= {"check_every": check_every, "donate": donate}
        self._options |= {"check_vma": check_vma, "overlap": bool(overlap)}
        self._checked = Checked(check_every, self._axis_name)
        self._reports = numbers.Reports()
        self._compiled: dict[Any, Any] = {}
        processes = {device.process_index for device in mesh.devices.flat}
        self._reported = ahead.ReportedBatch(len(processes))

    def init(
        self,
        params: Any,
        *,
        variables: Any = None,
        key: jax.Array | None = None,
        timeout: float | None = TIMEOUT,
    ) -> TrainState:
        """Returns the first state; its arrays are copies of the arguments.

        Args:
            params: The parameters, equal on all processes.
            variables: A tree of arrays that `loss_fn` changes and that are not trained by
                gradients, equal on all ranks at first. It is passed to `loss_fn` as
                `variables`.
            key: A PRNG key, from which a different one is derived for each rank and step,
                and passed to `loss_fn`.
            timeout: Seconds to wait for the other processes of the mesh, which compare
                parameters, optimizer and options before training. None compares nothing,
                and no shapes of batches later.

        Raises:
            ArgumentError: An argument cannot be used; see `sparsejax.init` for more errors.
            JobError: Processes are about to train different models, or do not answer.
        """
        self._batches.compares = timeout is not None
        job = Setup("trainer.init", self._mesh, timeout)
        with job.made_ready():
            check_key(key)
            of_variables.check_trained(params)
            of_variables.check_values(variables)
            if self._overlap:
                of_variables.check_by_rank(variables, self._variables)
            specs.check_shards(params, self._mesh)
            own = self._specs_of(params)
            if self._param_specs is None:
                arrays = specs.ParameterSpecs.of_arrays(params, self._mesh)
                arrays.check_arrays(self._axis_name, "trainer.init")
                arrays.check_replicated("trainer.init")
            maker = self._made_ready(job, params, variables, key)
        same = PartitionSpec()
        given = {"params": params, "variables": variables, "key": key}
        wanted = jax.tree.map(lambda _: same, given) | {"params": own}
        given = placing.on_all_processes(given, self._mesh, wanted, "trainer.init")
        params, variables, key = given["params"], given["variables"], given["key"]
        wrapped = of_variables.wrapped(variables, self._variables, self._axis_name)

        # By shard_map, so that the first step has inputs of the types of all later ones.
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
        opt_state = maker.make(params)
        self._reported.after(step, None)
        return TrainState(step, params, opt_state, variables, key)

    def _made_ready(self, job, params, variables, key):
        """Returns the maker of the optimizer's state; tells other processes the options."""
        of = params, self._mesh, self._axis_name
        maker = initial.Maker.of(self._tx, *of, self._param_specs, self._check_vma)
        if job.is_shared:
            maker.tell(job, self._tx, *of)
            job.say_tree("variables", "the variable", variables)
            kind = None if key is None else str(key.dtype)
            job.say("trainer", self._options | {"key": kind})
        return maker

    def _specs_of(self, params):
        given = PartitionSpec() if self._param_specs is None else self._param_specs
        return specs.full_specs(params, given)

    def step(
        self, state: TrainState, batch: Any, next_batch: Any = ahead.MISSING
    ) -> tuple[TrainState, Any]:
        """Takes a step. The state is donated, unless the trainer has `donate=False`.

        Args:
            state: The state, from `init` or from the last step.
            batch: A tree of arrays: the shares of the ranks, one after another along the
                leading axis. Each of several processes passes the shares of its own ranks,
                all of the same length, or a global `jax.Array`. They compare shapes when
                these are new.
            next_batch: The batch of the next step, if `sparsejax.embrace_sync` needs it;
                None if there is none. If another batch follows, delayed rows are applied
                first; on a mesh of several processes they are not, and the process warns.

        Returns:
            The next state, and the loss averaged over the ranks, or with `overlap` the loss
            of each rank. With auxiliary outputs, the loss and these.

        Raises:
            ArgumentError: The batch cannot be split, processes give different shapes that
                are new to all, or `loss_fn` or `tx` cannot be used.
            JobError: Shapes are new to this process alone, which waits for half an hour.
            StateError: The state was donated, or is of other ranks or parameters.
            ReplicaError: With `check_every`, ranks have different bits of the state.
            BadNumberError: By `skip_nonfinite(tx, report=True)`; its `state` is the next.
        """
        require_usable(state, "trainer.step")
        require_opt_state(state, self._tx)
        if not self._checked.is_last(state):
            # The state is not the result of the last step; it may be a restored one.
            require_not_traced(state, placing.TRACED)
            check_whole(state)
            self._check_ranks(state)
            whole = self._whole_specs(state)
            state = placing.on_mesh(state, self._mesh, whole, "trainer.step")
            if self._overlap:
                self._overlap.restart()
            self._reports.before(state)
        self._checked.before(state)
        is_ahead = self._is_ahead(state.params)
        ahead.check_next(is_ahead, batch, next_batch)
        announced = next_batch if is_ahead else None
        batches = [batch] if announced is None else [batch, announced]
        # Batches are placed before the state is donated, so that an error loses no state.
        batches = [self._batches.placed(one, "trainer.step") for one in batches]
        step = self.compiled(state, has_next=len(batches) > 1)
        if is_ahead and not self._reported.is_kept(state.step, batch):
            step.eval_shape(state, *batches)  # neither does an error while tracing
            state = self.flush(state)
        after, out = step(state, *batches)
        if self._overlap:
            params, opt_state = self._overlap.turn(after.params, after.opt_state)
            after = after._replace(params=params, opt_state=opt_state)
        self._checked.after(after)
        self._reported.after(after.step, announced)
        self._reports.after(after)
        return after, out

    def flush(self, state: TrainState) -> TrainState:
        """Applies all updates that wait for the next step, and catches up all rows.

        These are delayed rows of `sparsejax.embrace_sync`, and gradients carried by
        `sparsejax.embrace.horizontal`. Call it before parameters are read by anything but
        `evaluate`, or saved other than to resume. All processes of the mesh call it. The
        state is donated, as by a step.

        Args:
            state: The state, from `init` or from the last step.

        Raises:
            ArgumentError: Nothing in `tx` waits for the next step.
            StateError: The state was donated, or is of another number of ranks.
        """
        require_usable(state, "trainer.flush")
        if not self._waits(state.params):
            raise ArgumentError(
                "trainer.flush: nothing in tx waits for the next step, as rows do that "
                "sparsejax.embrace_sync holds back, and gradients that "
                "sparsejax.embrace.horizontal carries. Where rows of tables are late, "
                "sparsejax.rows.settle catches them up."
            )
        check_ranks(state.opt_state, self._ranks, inside=False)
        key = "flush", jax.tree.structure(state)
        if key not in self._compiled:
            whole = self._whole_specs(state)
            settled = functools.partial(halves.settled, self._tx)
            mapped = self._on_ranks(settled, whole, whole, batches=0)
            self._compiled[key] = jax.jit(mapped, donate_argnums=0 if self._donate else ())
        after = self._compiled[key](state)
        self._checked.flushed(state, after)
        self._reported.after(after.step, None)
        return after

    def _waits(self, params):
        """Returns whether updates of a step may wait for the next one."""
        return halves.has_two(self._tx) or self._is_ahead(params)

    def _is_ahead(self, params):
        """Returns whether a part of the optimizer needs the next batch."""
        return self._known(params)[0]

    def _known(self, params):
        """Returns whether the next batch is needed, and whether rows may be late."""
        key = "known", jax.tree.structure(params)
        if key not in self._compiled:
            seen = observing.observed(self._tx, params)
            by_rows = takes_rows(seen)
            is_ahead = ahead.check_chain(seen, by_rows, self._capacity)
            self._compiled[key] = is_ahead, bool(seen.rows)
        return self._compiled[key]

    def evaluate(self, state: TrainState, batch: Any) -> Any:
        """Returns the loss of a batch, without a gradient or an update.

        It calls `eval_fn`, or `loss_fn` if that is None, as a step calls `loss_fn`, and
        drops the variables that it returns. `opt_state` may be None unless updates wait for
        the next step, or rows may have missed steps.

        Args:
            state: The state, from `init` or from a step.
            batch: The batch; see `step`.

        Returns:
            The loss averaged over ranks; with auxiliary outputs, the loss and these.
        """
        require_usable(state, "trainer.evaluate")
        # The optimizer's state, which may be large, is passed only if it is needed.
        _, has_late_rows = self._known(state.params)
        if not self._waits(state.params) and not has_late_rows:
            state = state._replace(opt_state=None)
        background.wait()
        batch = self._batches.placed(batch, "trainer.evaluate")
        return self._evaluation(state)(state, batch)

    def compiled(self, state: TrainState, has_next: bool = False) -> Any:
        """Returns the jitted step, for `lower` and `compile`; one per structure of state.

        Args:
            state: The state.
            has_next: Whether the step is given the next batch, too, as the last argument.
        """
        self._check_ranks(state)
        key = "step", has_next, jax.tree.structure(state)
        if key not in self._compiled:
            whole = self._whole_specs(state)

            def mapped(gives_value):
                def step(state, *batches):
                    of = batches, whole.opt_state, gives_value
                    return self._step_program.step(state, *of)

                out_specs = whole, self._step_program.output_specs()
                return self._on_ranks(step, whole, out_specs, 1 + has_next)

            def step(state, *batches):
                # A program that fails while it is traced leaves nothing in this one.
                try:
                    return mapped(False)(state, *batches)
                except asked.NeedsValueError:
                    pass
                return mapped(True)(state, *batches)

            self._compiled[key] = jax.jit(step, donate_argnums=0 if self._donate else ())
        return self._compiled[key]

    def _evaluation(self, state):
        """Returns the jitted evaluation, one for each structure of state."""
        of_variables.check_ranks(state.variables, self._ranks)
        key = "evaluate", jax.tree.structure(state)
        if key not in self._compiled:
            settle = state.opt_state is not None and self._waits(state.params)

            def evaluation(state, batch):
                return self._program.evaluation(state, batch, settle)

            known = self._whole_specs(state), self._program.output_specs()
            self._compiled[key] = jax.jit(self._on_ranks(evaluation, *known))
        return self._compiled[key]

    def _check_ranks(self, state):
        """Raises where what is kept by rank is of another number of ranks."""
        check_ranks(state.opt_state, self._ranks, inside=False)
        of_variables.check_ranks(state.variables, self._ranks)

    def _on_ranks(self, local, state_specs, out_specs, batches=1):
        """Maps a function of a rank's state and shares of batches over all ranks."""
        in_specs = (state_specs, *[PartitionSpec(self._axis_name)] * batches)
        return initial.on_ranks(
            local,
            mesh=self._mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=self._check_vma,
        )

    def _whole_specs(self, state) -> Any:
        own = self._specs_of(state.params)
        known = (state.params, own) if self._param_specs is not None else ()
        opt_state = specs.state_specs(state.opt_state, *known)
        rest = specs.state_specs(state._replace(params=None, opt_state=None))
        return rest._replace(params=own, opt_state=opt_state)
