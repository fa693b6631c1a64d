"""What the versions of JAX call the parts of a traced program: the one file that knows.

Written for JAX 0.10 to 0.12. An equation that has a part which is not known here is not
looked into.
"""

import enum
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core, source_info_util
from jax.sharding import AxisType


class CallKind(enum.Enum):
    """What an equation does with the programs inside it."""

    INLINE = "runs it once"
    REMAT = "runs it once, and again when it is differentiated"
    CUSTOM = "runs it once, and has a derivative of its own"
    SCAN = "runs it once a turn"
    COND = "runs one of them"


_KINDS = {
    **dict.fromkeys(("jit", "pjit", "closed_call", "core_call"), CallKind.INLINE),
    **dict.fromkeys(("remat", "remat2", "checkpoint"), CallKind.REMAT),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), CallKind.CUSTOM),
    "scan": CallKind.SCAN,
    "cond": CallKind.COND,
}

# All parameters that an equation may have; where the names alone say nothing, None.
_KNOWN = {
    CallKind.REMAT: {"jaxpr", "prevent_cse", "differentiated", "policy"},
    # How many inputs are constants and how many carried is in the last two since JAX 0.11.
    CallKind.SCAN: {"jaxpr", "reverse", "length", "unroll", "linear", "_split_transpose"}
    | {"num_consts", "num_carry", "ft_in", "ft_out"},
    CallKind.COND: {"branches"},
}


def kind_of(eqn: Any) -> CallKind | None:
    """What an equation is, if all about it is known; None otherwise."""
    kind, params = _KINDS.get(eqn.primitive.name), eqn.params
    if kind is None or set(params) - _KNOWN.get(kind, set(params)):
        return None
    if kind is CallKind.SCAN:
        known = _is_known_scan(eqn)
    elif kind is CallKind.REMAT:
        known = isinstance(params["prevent_cse"], bool) and not params["differentiated"]
    else:
        known = True
    return kind if known and _are_as_given(eqn, kind) else None


def programs(eqn: Any) -> list[core.ClosedJaxpr]:
    """The programs inside an equation."""
    if "branches" in eqn.params:
        return [closed(branch) for branch in eqn.params["branches"]]
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    return [] if inner is None else [closed(inner)]


def held(eqn: Any) -> list[core.ClosedJaxpr]:
    """All programs among the parameters of an equation, whatever it does with them."""
    values = (x if isinstance(x, tuple | list) else (x,) for x in eqn.params.values())
    return [closed(x) for some in values for x in some if hasattr(x, "eqns")]


def closed(jaxpr: Any) -> core.ClosedJaxpr:
    """A program with its constants; since JAX 0.11 every program has them."""
    return jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else core.ClosedJaxpr(jaxpr, ())


def scan_split(eqn: Any) -> tuple[int, int]:
    """Where the carry and where the slices begin among the inputs of a scan.

    Raises:
        ValueError: This JAX says it in another way.
    """
    params = eqn.params
    if "num_consts" in params:
        return params["num_consts"], params["num_consts"] + params["num_carry"]
    try:
        consts, carry, _ = (len(list(group)) for group in params["ft_in"].unpack())
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError("unknown parameters of a scan") from error
    return consts, consts + carry


def is_literal(atom: Any) -> bool:
    """Whether an input of an equation is a number in the program's text."""
    return isinstance(atom, core.Literal)


def literal(atom: Any) -> Any:
    """The array that a literal is."""
    return jnp.asarray(atom.val, atom.aval.dtype)


def is_real(atom: Any) -> bool:
    """Whether a gradient can flow through a variable, as far as its dtype tells."""
    return jnp.issubdtype(getattr(atom.aval, "dtype", jnp.int32), jnp.inexact)


def touches_memory(eqn: Any) -> bool:
    """Whether an equation reads or writes a mutable array.

    A gradient can flow through it to what stands below it in no chain of variables.
    """
    return any("Ref" in type(atom.aval).__name__ for atom in (*eqn.invars, *eqn.outvars))


def varying(aval: Any) -> frozenset[str]:
    """The mesh axes over which values of a type vary."""
    return frozenset(aval.manual_axis_type.varying)


def context(eqn: Any) -> Any:
    """A context manager: that in which an equation was traced, its mesh in particular."""
    return eqn.ctx.manager


def sharding_after(jaxpr: Any, v: Any, outputs: Sequence[Any]) -> Any:
    """How a variable lies on an explicit mesh: by its type, or where it returns to one.

    JAX traces a lookup with `out_sharding` on Auto axes, and what comes out is put on the
    explicit mesh by a `reshard`, maybe after something was done to each number.

    Args:
        jaxpr: The program.
        v: The variable.
        outputs: What is known of the program's outputs in the same way, from outside.

    Returns:
        A NamedSharding; None where it cannot be told.
    """
    while True:
        sharding = v.aval.sharding
        if {*sharding.mesh.axis_types} == {AxisType.Explicit}:
            return sharding
        users = [eqn for eqn in jaxpr.eqns if any(x is v for x in eqn.invars)]
        places = [at for at, x in enumerate(jaxpr.outvars) if x is v]
        if places and not users:
            return outputs[places[0]]
        if len(users) != 1 or len(users[0].outvars) != 1:
            return None
        (v,) = users[0].outvars
        if v.aval.shape != users[0].invars[-1].aval.shape:
            return None


def place(eqn: Any) -> str:
    """What an equation is, and the file and line that it comes from."""
    return f"{eqn.primitive.name} at {line(eqn)}"


def line(eqn: Any) -> str:
    """The file and line of the user's program that an equation comes from."""
    try:
        return source_info_util.summarize(eqn.source_info)
    except Exception:  # the gradient is right without it
        return "an unknown line"


def named(eqn: Any) -> str:
    """An equation, and the transformation of optax that it is from, for people."""
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback else ():
        maker, _, inside = frame.function_name.partition(".<locals>.")
        if inside.startswith("update") and "optax" in frame.file_name:
            return f"optax.{maker}"
    return place(eqn)


def evaluate(jaxpr: Any, eqns: Sequence[Any], read: Callable[[Any], Any]) -> dict[Any, Any]:
    """Runs some equations of a program as JAX does.

    Args:
        jaxpr: The program.
        eqns: Equations of it that follow each other.
        read: From a variable that is not written by them to its value.

    Returns:
        The values of the variables that the equations write.
    """
    made = dict.fromkeys(
        v for eqn in eqns for v in eqn.outvars if not isinstance(v, core.DropVar)
    )
    used = (v for eqn in eqns for v in eqn.invars if not is_literal(v))
    free = list(dict.fromkeys(v for v in used if v not in made))
    part = jaxpr.replace(constvars=[], invars=free, outvars=[*made], eqns=[*eqns])
    values = core.jaxpr_as_fun(closed(part))(*map(read, free))
    return dict(zip(made, values, strict=True))


def _is_known_scan(eqn):
    try:
        scan_split(eqn)
    except ValueError:
        return False
    # Without a turn, what is carried comes out though the program does not return it.
    return eqn.params["length"] > 0 and not eqn.params.get("_split_transpose")


def _are_as_given(eqn, kind):
    """Whether the programs inside an equation have the types that are seen outside."""
    inside = [inner.jaxpr for inner in programs(eqn)]
    if kind in (CallKind.SCAN, CallKind.CUSTOM):
        return len(inside) == 1 and len(inside[0].invars) == len(eqn.invars)
    given = eqn.invars[1:] if kind is CallKind.COND else eqn.invars
    return bool(inside) and all(
        _same_types(given, jaxpr.invars) and _same_types(eqn.outvars, jaxpr.outvars)
        for jaxpr in inside
    )


def _same_types(ours, theirs):
    strong = lambda v: getattr(v.aval, "strip_weak_type", lambda: v.aval)()
    return len(ours) == len(theirs) and all(
        strong(a) == strong(b) for a, b in zip(ours, theirs, strict=True)
    )
