"""The names and parameters of equations in versions of JAX, which only this file knows.

It is written for JAX 0.10 to 0.12. An equation with a name or a parameter that is not
listed here is of no known kind.
"""

import enum
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core, source_info_util
from jax.sharding import AxisType


class CallKind(enum.Enum):
    """How an equation runs the programs inside it."""

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

# The elementwise primitives. An operand without axes stands for an array of its number.
BY_NUMBER = frozenset(
    {
        *("abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan"),
        *("atan2", "atanh", "cbrt", "ceil", "clamp", "convert_element_type", "copy"),
        *("copy_p", "cos"),
        *("cosh", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor"),
        *("ge", "gt", "imag", "integer_pow", "is_finite", "le", "log", "log1p", "logistic"),
        *("lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or", "pow", "pvary"),
        *("real", "reduce_precision", "rem", "round", "rsqrt", "select_n", "sign", "sin"),
        *("sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor"),
    }
)

# The parameters that an equation of a kind may have; for kinds not listed, any.
_KNOWN = {
    CallKind.REMAT: {"jaxpr", "prevent_cse", "differentiated", "policy"},
    # Since JAX 0.11, ft_in and ft_out have the numbers of constants and of carried inputs.
    CallKind.SCAN: {"jaxpr", "reverse", "length", "unroll", "linear", "_split_transpose"}
    | {"num_consts", "num_carry", "ft_in", "ft_out"},
    CallKind.COND: {"branches"},
}


def kind_of(eqn: Any) -> CallKind | None:
    """Returns the kind of an equation; None if its name or a parameter is not known."""
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
    """Returns the programs that an equation of a known kind runs: branches, or one."""
    if "branches" in eqn.params:
        return [closed(branch) for branch in eqn.params["branches"]]
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    return [] if inner is None else [closed(inner)]


def held(eqn: Any) -> list[core.ClosedJaxpr]:
    """Returns all programs among the parameters of an equation of any kind."""
    values = (x if isinstance(x, tuple | list) else (x,) for x in eqn.params.values())
    return [closed(x) for some in values for x in some if hasattr(x, "eqns")]


def closed(jaxpr: Any) -> core.ClosedJaxpr:
    """Returns a program as a `ClosedJaxpr`; since JAX 0.11 every program is one."""
    return jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else core.ClosedJaxpr(jaxpr, ())


def scan_split(eqn: Any) -> tuple[int, int]:
    """Returns the positions of the first carried and of the first sliced input of a scan.

    Raises:
        ValueError: The parameters of this version of JAX are not known.
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
    """Returns whether an input of an equation is a literal."""
    return isinstance(atom, core.Literal)


def literal(atom: Any) -> Any:
    """Returns the array of a literal."""
    return jnp.asarray(atom.val, atom.aval.dtype)


def is_real(atom: Any) -> bool:
    """Returns whether the dtype of a variable is one through which a gradient can flow."""
    return jnp.issubdtype(getattr(atom.aval, "dtype", jnp.int32), jnp.inexact)


def touches_memory(eqn: Any) -> bool:
    """Returns whether an equation reads or writes a mutable array (a `Ref`).

    A gradient can flow through it to equations that share no variable with this one.
    """
    return any("Ref" in type(atom.aval).__name__ for atom in (*eqn.invars, *eqn.outvars))


def varying(aval: Any) -> frozenset[str]:
    """Returns the mesh axes over which values of a type vary."""
    return frozenset(aval.manual_axis_type.varying)


def context(eqn: Any) -> Any:
    """Returns a context manager that restores the context of an equation, with its mesh."""
    return eqn.ctx.manager


def sharding_after(jaxpr: Any, v: Any, outputs: Sequence[Any]) -> Any:
    """Returns the sharding of a variable on an explicit mesh, or that of its only use.

    JAX traces a lookup with `out_sharding` on Auto axes. Its result is moved to the
    explicit mesh by a `reshard`, perhaps after elementwise operations, which are followed.

    Args:
        jaxpr: The program.
        v: The variable.
        outputs: The shardings of the program's outputs, where the program is called.

    Returns:
        A NamedSharding; None if it is not determined.
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
    """Returns the name of an equation's primitive, and the file and line of its source."""
    return f"{eqn.primitive.name} at {line(eqn)}"


def line(eqn: Any) -> str:
    """Returns the file and line of the user's program that an equation comes from."""
    try:
        return source_info_util.summarize(eqn.source_info)
    except Exception:  # the gradient is right without it
        return "an unknown line"


def named(eqn: Any) -> str:
    """Returns the optax transformation that an equation comes from, else its `place`."""
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
        eqns: Consecutive equations of it.
        read: A function from a variable that they do not write to its value.

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
    # With no iteration, the carry is returned as it was given, and not by the program.
    return eqn.params["length"] > 0 and not eqn.params.get("_split_transpose")


def _are_as_given(eqn, kind):
    """Returns whether the programs inside an equation have the types of its variables."""
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
