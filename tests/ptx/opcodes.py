"""What each opcode computes, one lane at a time, as the PTX ISA says it.

The machine computes all lanes at once with NumPy. These functions take the operands of one
lane as Python's integers, the bits of a register, and follow the pseudocode of the ISA;
nothing is shared with the machine. None stands for a result that the ISA leaves open.
"""

import functools
import math
import operator
import struct
from collections.abc import Callable
from fractions import Fraction

from tests.ptx.machine.code import FENCES
from tests.ptx.machine.lanes import OPCODES


Lane = Callable[..., int | bool | None]
# Instructions that reach memory or lead elsewhere are in programs of `test_instructions`.
WORDS_OF_ATOMICS = "gpu.relaxed", "relaxed.gpu", "gpu.acq_rel", "acq_rel.gpu"
_ATOMICS = "add.f32", "add.u32", "or.b32", "cas.b32"
_MOVED = "b8", "b16", "b32", "b64", "v2.b8", "v2.b32", "v4.b32", "v2.b64"


def bits_of(kind: str) -> int:
    return 1 if kind == "pred" else int(kind.lstrip("busf"))


def signed(x: int, bits: int) -> int:
    return x - (1 << bits) if x >> bits - 1 else x


def _read(x, kind):
    return signed(x, bits_of(kind)) if kind[0] == "s" else x


def _cut(x, kind):
    return x & (1 << bits_of(kind)) - 1


def to_float(x: int) -> float:
    return struct.unpack("<f", struct.pack("<I", x))[0]


def of_float(x: float) -> int:
    """The bits of the nearest float32; all NaNs are one."""
    return rounded(x, 24, -126, 127) if not math.isnan(x) else 0x7FFFFFFF


def rounded(x: float, digits: int, lowest: int, highest: int) -> int:
    """The bits of the number that is nearest to x in a format of floats, ties to even.

    Args:
        x: A number that is not NaN.
        digits: Of the significand, with the first, which is not stored.
        lowest: The least exponent of a normal number.
        highest: The largest exponent.
    """
    width = digits - 1 + (highest - lowest + 2).bit_length()
    sign = int(math.copysign(1, x) < 0) << width
    infinity = (highest - lowest + 2) << digits - 1
    if math.isinf(x):
        return sign | infinity
    exact = abs(Fraction(x))
    exponent = max(lowest, math.frexp(abs(x))[1] - 1) if x else lowest
    unit = Fraction(2) ** (exponent - digits + 1)
    count = round(exact / unit)  # ties to even
    if count < 1 << digits - 1:
        return sign | count  # denormal, or zero
    # A carry into the next exponent comes out right.
    return sign | min(infinity, (exponent - lowest << digits - 1) + count)


# By families. The kind is what follows the family's name.


def _two(function):
    """Of two numbers of a kind; the result is cut to its width."""
    return lambda kind: lambda a, b: _cut(function(_read(a, kind), _read(b, kind)), kind)


def _divided(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _of_division(function):
    """Of the quotient, which the ISA leaves open where there is none."""

    def of(kind):
        def run(a, b):
            a, b = _read(a, kind), _read(b, kind)
            overflows = b == -1 and a == -(1 << bits_of(kind) - 1)
            return None if b == 0 or overflows else _cut(function(a, b), kind)

        return run

    return of


def _upper(kind):
    return lambda a, b: _cut(_read(a, kind) * _read(b, kind) >> bits_of(kind), kind)


def _twice(kind):
    return f"{kind[0]}{2 * bits_of(kind)}"


def _wide(kind):
    return lambda a, b: _cut(_read(a, kind) * _read(b, kind), _twice(kind))


def _wide_sum(kind):
    return lambda a, b, c: _cut(_read(a, kind) * _read(b, kind) + c, _twice(kind))


def _field(kind):
    def run(a, b, c):
        last, at, length = 31, b & 255, c & 255
        sign = 0
        if kind[0] == "s" and length:
            sign = a >> min(at + length - 1, last) & 1
        done = 0
        for i in range(last + 1):
            bit = a >> at + i & 1 if i < length and at + i <= last else sign
            done |= bit << i
        return done

    return run


_COMPARED = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}


def _compared(kind, compare):
    if kind != "f32":
        return lambda a, b: _COMPARED[compare](_read(a, kind), _read(b, kind))

    def run(a, b):
        x, y = to_float(a), to_float(b)
        if math.isnan(x) or math.isnan(y):
            return compare.endswith("u")
        return _COMPARED[compare.removesuffix("u")](x, y)

    return run


def _left(kind):
    return lambda a, b: _cut(a << min(b, bits_of(kind)), kind)


def _right(kind):
    return lambda a, b: _cut(_read(a, kind) >> min(b, bits_of(kind)), kind)


def _funnel_left(a, b, c):
    by = c & 31
    return (b << by | a >> 32 - by) & 0xFFFFFFFF


def _funnel_right(a, b, c):
    by = c & 31
    return (b << 32 - by | a >> by) & 0xFFFFFFFF


def _permuted(a, b, c):
    pair, done = b << 32 | a, 0
    for place in range(4):
        control = c >> 4 * place & 15
        octet = pair >> 8 * (control & 7) & 255
        if control & 8:
            octet = 255 if octet >> 7 else 0
        done |= octet << 8 * place
    return done


def _converted(kinds):
    to, kind = kinds.split(".")
    return lambda a: _cut(_read(a, kind), to)


def _narrowed(digits, lowest, highest):
    def run(a):
        x = to_float(a)
        return None if math.isnan(x) else rounded(x, digits, lowest, highest)

    return run


def _of_half(a):
    x = struct.unpack("<e", struct.pack("<H", a))[0]
    return None if math.isnan(x) else of_float(x)


def _of_bfloat(a):
    return None if math.isnan(to_float(a << 16)) else a << 16


def _sum(a, b):
    # Of two float32 the float64 sum, rounded once more, is the float32 sum.
    return of_float(to_float(a) + to_float(b))


def _difference(a, b):
    return of_float(to_float(a) - to_float(b))


def _product(a, b):
    return of_float(to_float(a) * to_float(b))


def _but_nan(function):
    """Of which NaN comes of a NaN, the ISA does not say."""
    return lambda a: None if math.isnan(to_float(a)) else function(a)


def _flushed_magnitude(a):
    tiny = a & 0x7F800000 == 0
    return 0 if tiny else a & 0x7FFFFFFF


_BY_FAMILY: dict[str, Callable[[str], Lane]] = {
    "add": _two(operator.add),
    "sub": _two(operator.sub),
    "mul.lo": _two(operator.mul),
    "mul.hi": _upper,
    "mul.wide": _wide,
    "mad.wide": _wide_sum,
    "mad.lo": lambda kind: lambda a, b, c: _cut(a * b + c, kind),
    "min": _two(min),
    "max": _two(max),
    "min.relu": _two(lambda a, b: max(min(a, b), 0)),
    "div": _of_division(_divided),
    "rem": _of_division(lambda a, b: a - b * _divided(a, b)),
    "neg": lambda kind: lambda a: _cut(-a, kind),
    "abs": lambda kind: lambda a: _cut(abs(_read(a, kind)), kind),
    "popc": lambda kind: lambda a: a.bit_count(),
    "bfe": _field,
    "selp": lambda kind: lambda a, b, p: a if p else b,
    "and": lambda kind: lambda a, b: a & b,
    "or": lambda kind: lambda a, b: a | b,
    "xor": lambda kind: lambda a, b: a ^ b,
    "not": lambda kind: lambda a: a ^ (1 << bits_of(kind)) - 1,
    "shl": _left,
    "shr": _right,
    "shf.l.wrap": lambda kind: _funnel_left,
    "shf.r.wrap": lambda kind: _funnel_right,
    "prmt": lambda kind: _permuted,
    "mov": lambda kind: lambda a: a,
}
_BY_NAME: dict[str, Lane] = {
    "cvt.f32.f16": _of_half,
    "cvt.f32.bf16": _of_bfloat,
    "cvt.rn.f16.f32": _narrowed(11, -14, 15),
    "cvt.rn.bf16.f32": _narrowed(8, -126, 127),
    "add.f32": _sum,
    "add.rn.f32": _sum,
    "sub.f32": _difference,
    "sub.rn.f32": _difference,
    "mul.f32": _product,
    "mul.rn.f32": _product,
    "neg.f32": _but_nan(lambda a: a ^ 1 << 31),
    "abs.f32": _but_nan(lambda a: a & 0x7FFFFFFF),
    "abs.ftz.f32": _but_nan(_flushed_magnitude),
}


def _shuffled(way: str, number: int, b: int, c: int) -> int:
    """From which lane a lane takes its number."""
    at, clamp, segment = b & 31, c & 31, c >> 8 & 31
    last = number & segment | clamp & ~segment
    lowest = number & segment
    there, inside = {
        "up": (number - at, number - at >= last),
        "down": (number + at, number + at <= last),
        "bfly": (number ^ at, number ^ at <= last),
        "idx": (lowest | at & ~segment, lowest | at & ~segment <= last),
    }[way]
    return there if inside else number


def expected(opcode: str, operands: list[list[int]]) -> list[int | bool | None]:
    """What an opcode makes of 32 lanes.

    Args:
        opcode: With all that follows its dots.
        operands: Each of 32 numbers.
    """
    family, kind = opcode.rsplit(".", 1)
    if family.startswith("shfl.sync."):
        a, b, c, _ = operands
        way = family.removeprefix("shfl.sync.")
        return [a[_shuffled(way, i, b[i], c[i])] for i in range(len(a))]
    if family.startswith("redux.sync."):
        return _reduced(family.removeprefix("redux.sync."), kind, operands[0])
    return [of_lane(opcode)(*lane) for lane in zip(*operands, strict=True)]


def _reduced(how, kind, lanes):
    functions = {
        "add": operator.add, "min": min, "max": max, "and": operator.and_,
        "or": operator.or_, "xor": operator.xor,
    }  # fmt: skip
    done = functools.reduce(functions[how], [_read(x, kind) for x in lanes])
    return [_cut(done, kind)] * len(lanes)


def of_lane(opcode: str) -> Lane:
    """What an opcode computes of one lane's operands."""
    if opcode in _BY_NAME:
        return _BY_NAME[opcode]
    family, kind = opcode.rsplit(".", 1)
    if family.startswith("setp."):
        return _compared(kind, family.removeprefix("setp."))
    if family.startswith("cvt."):
        return _converted(opcode.removeprefix("cvt."))
    return _BY_FAMILY[family](kind)


# Of memory and control, with what may stand between their dots.
INSTRUCTIONS = {
    "ret", "bra", "bra.uni", "bar.sync", "nop", "ld.param.b64", "mov.b32", "mov.b64",
    *(f"ld.{space}.{kind}" for space in ("global", "shared")
      for kind in (*_MOVED, "s32")),
    *(f"st.{space}.{kind}" for space in ("global", "shared")
      for kind in _MOVED),
    *(f"atom.global.{words}.{one}" for words in WORDS_OF_ATOMICS for one in _ATOMICS),
    *FENCES,
    *(f"{kind}matrix.sync.aligned.m8n8.x4.shared.b16" for kind in ("ld", "st")),
}  # fmt: skip


def tested() -> set[str]:
    """The opcodes that have a test of their own."""
    return {*OPCODES} | INSTRUCTIONS
