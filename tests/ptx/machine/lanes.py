"""What instructions compute: functions of the lanes of a warp.

A register of a warp is an array of 32 lanes: bool for a predicate, otherwise unsigned and
as wide as the register. What the opcode says of its type decides how the bits are read, as
int32 for ".s32". The table has each opcode with all that follows its dots, and the width of
each operand: one that is not in it is not known. Sections are those of the PTX ISA 9.
"""

import dataclasses
import operator
from collections.abc import Callable

import ml_dtypes
import numpy as np


LANES = 32
U32, U64 = np.uint32, np.uint64
NUMBERS = np.arange(LANES)
NAN = U32(0x7FFFFFFF)  # what arithmetic on float32 makes of any NaN

# As what a type reads a register.
TYPES = {
    "pred": np.dtype(bool),
    **{f"{kind}{n}": np.dtype(f"u{n // 8}") for kind in "bu" for n in (8, 16, 32, 64)},
    **{f"s{n}": np.dtype(f"i{n // 8}") for n in (8, 16, 32, 64)},
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype(np.float32),
}
INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64")


@dataclasses.dataclass(frozen=True)
class Opcode:
    """What an opcode computes.

    Attributes:
        function: From the operands' lanes to the result's.
        result: The type of its result; its width is that of the register.
        operands: The type of each operand, by its width alone.
    """

    function: Callable[..., np.ndarray]
    result: str
    operands: tuple[str, ...]


OPCODES: dict[str, Opcode] = {}


def _add(name, function, result, *operands):
    OPCODES[name] = Opcode(function, result, operands)


def _typed(kind, function):
    """A function of numbers of a type, as one of registers."""
    dtype = TYPES[kind]

    def run(*lanes):
        done = function(*(x.view(dtype) for x in lanes))
        return done if done.dtype == bool else done.view(f"u{done.itemsize}")

    return run


def twice(kind):
    """The type of twice the width."""
    return f"{kind[0]}{2 * int(kind[1:])}"


# Integer arithmetic, 9.7.1. Sums and products wrap, so signs make no difference to them.


def _high(kind):
    """The upper half of a product, in Python's integers."""
    dtype, bits = TYPES[kind], int(kind[1:])

    def run(a, b):
        pairs = zip(a.view(dtype).tolist(), b.view(dtype).tolist(), strict=True)
        mask = (1 << bits) - 1
        return np.array([(x * y >> bits) & mask for x, y in pairs], f"u{bits // 8}")

    return run


def _wide(kind):
    wide = TYPES[twice(kind)]
    return _typed(kind, lambda a, b: a.astype(wide) * b.astype(wide))


def _quotient(a, b):
    """Towards zero. The ISA leaves a division by zero open; an H200 gives all ones."""
    wide_a, wide_b = a.astype(object), np.where(b == 0, 1, b).astype(object)
    done = [
        abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
        for x, y in zip(wide_a, wide_b, strict=True)
    ]
    bits = 8 * a.itemsize
    quotient = np.array([x & ((1 << bits) - 1) for x in done], f"u{a.itemsize}")
    return np.where(b == 0, np.invert(np.zeros_like(quotient)), quotient).view(a.dtype)


def _rest(a, b):
    """What a division leaves; of one by zero as the quotient."""
    quotient = _quotient(a, b)
    return np.where(b == 0, quotient, a - quotient * b)


for _kind in INTEGERS:
    _add(f"add.{_kind}", operator.add, _kind, _kind, _kind)
    _add(f"sub.{_kind}", operator.sub, _kind, _kind, _kind)
    _add(f"mul.lo.{_kind}", operator.mul, _kind, _kind, _kind)
    _add(f"mad.lo.{_kind}", lambda a, b, c: a * b + c, _kind, _kind, _kind, _kind)
    _add(f"mul.hi.{_kind}", _high(_kind), _kind, _kind, _kind)
    _add(f"min.{_kind}", _typed(_kind, np.minimum), _kind, _kind, _kind)
    _add(f"max.{_kind}", _typed(_kind, np.maximum), _kind, _kind, _kind)
    _add(f"div.{_kind}", _typed(_kind, _quotient), _kind, _kind, _kind)
    _add(f"rem.{_kind}", _typed(_kind, _rest), _kind, _kind, _kind)
for _kind in ("u16", "s16", "u32", "s32"):
    _long, _product = twice(_kind), _wide(_kind)
    _add(f"mul.wide.{_kind}", _product, _long, _kind, _kind)
    _add(
        f"mad.wide.{_kind}",
        lambda a, b, c, product=_product: product(a, b) + c,
        _long,
        _kind,
        _kind,
        _long,
    )
for _kind in ("s16", "s32", "s64"):
    _add(f"neg.{_kind}", operator.neg, _kind, _kind)
    _add(f"abs.{_kind}", _typed(_kind, np.abs), _kind, _kind)
_relu = _typed("s32", lambda a, b: np.maximum(np.minimum(a, b), 0))
_add("min.relu.s32", _relu, "s32", "s32", "s32")
_add("popc.b32", lambda a: np.bitwise_count(a).astype(U32), "u32", "b32")


def _field(a, at, length):
    """Bits of a number, of which eight bits say where they begin, eight how many."""
    at = (at & U32(255)).clip(max=63).astype(U64)
    length = (length & U32(255)).clip(max=32).astype(U64)
    return ((a.astype(U64) >> at) & ((U64(1) << length) - U64(1))).astype(U32)


def _signed_field(a, at, length):
    """The same, extended by its last bit, or by the number's where it goes past that."""
    field = _field(a, at, length)
    at, length = (at & U32(255)).astype(np.int64), (length & U32(255)).astype(np.int64)
    last = np.minimum(at + length - 1, 31)
    sign = (a >> last.clip(0).astype(U32)) & U32(1) & (length > 0).astype(U32)
    known = np.minimum(length, np.maximum(0, 32 - at))
    above = np.where(known < 32, U32(0xFFFFFFFF) << known.clip(max=31).astype(U32), U32(0))
    return np.where(sign == 1, field | above, field).astype(U32)


_add("bfe.u32", _field, "u32", "u32", "u32", "u32")
_add("bfe.s32", _signed_field, "s32", "s32", "u32", "u32")

# Comparisons and selections, 9.7.6. With a NaN ordered ones are false, "u" ones true.

_COMPARED = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


def _unordered(compare):
    return lambda a, b: compare(a, b) | np.isnan(a) | np.isnan(b)


def _ordered(compare):
    return lambda a, b: compare(a, b) & ~np.isnan(a) & ~np.isnan(b)


for _kind in (*INTEGERS, "b16", "b32", "b64"):
    for _name, _compare in _COMPARED.items():
        if _kind[0] == "b" and _name not in ("eq", "ne"):
            continue
        _add(f"setp.{_name}.{_kind}", _typed(_kind, _compare), "pred", _kind, _kind)
for _name, _compare in _COMPARED.items():
    _pair = "pred", "f32", "f32"
    _add(f"setp.{_name}.f32", _typed("f32", _ordered(_compare)), *_pair)
    _add(f"setp.{_name}u.f32", _typed("f32", _unordered(_compare)), *_pair)
for _kind in ("b16", "b32", "b64"):
    _add(f"selp.{_kind}", lambda a, b, p: np.where(p, a, b), _kind, _kind, _kind, "pred")

# Logic and shifts, 9.7.8. A shift by the width or more leaves zeros, or the sign.


def _left(a, by):
    bits = 8 * a.itemsize
    done = np.left_shift(a, np.minimum(by, bits - 1).astype(a.dtype))
    return np.where(by < bits, done, a.dtype.type(0))


def _right(kind):
    dtype, bits = TYPES[kind], int(kind[1:])

    def run(a, by):
        number = a.view(dtype)
        done = np.right_shift(number, np.minimum(by, bits - 1).astype(dtype))
        if dtype.kind == "u":
            done = np.where(by < bits, done, dtype.type(0))
        return done.view(a.dtype)

    return run


def _funnel_left(low, high, by):
    """The upper word of a pair that is shifted by 0 to 31."""
    pair = high.astype(U64) << U64(32) | low
    return (pair << (by & U32(31)).astype(U64) >> U64(32)).astype(U32)


def _funnel_right(low, high, by):
    pair = high.astype(U64) << U64(32) | low
    return (pair >> (by & U32(31)).astype(U64)).astype(U32)


def _permuted(a, b, by):
    """Bytes of a pair, chosen by four bits each, of which the last copies the sign."""
    octets = np.stack([a, b], 1).view(np.uint8)
    done = np.empty((LANES, 4), np.uint8)
    for place in range(4):
        one = (by >> U32(4 * place)) & U32(15)
        octet = octets[NUMBERS, one & 7]
        signs = np.where(octet >> 7, 255, 0).astype(np.uint8)
        done[:, place] = np.where(one & 8, signs, octet)
    return done.view(U32)[:, 0]


for _kind in ("b16", "b32", "b64", "pred"):
    _add(f"and.{_kind}", operator.and_, _kind, _kind, _kind)
    _add(f"or.{_kind}", operator.or_, _kind, _kind, _kind)
    _add(f"xor.{_kind}", operator.xor, _kind, _kind, _kind)
    _add(f"not.{_kind}", operator.invert, _kind, _kind)
for _kind in ("16", "32", "64"):
    _add(f"shl.b{_kind}", _left, f"b{_kind}", f"b{_kind}", "u32")
    _add(f"shr.u{_kind}", _right(f"u{_kind}"), f"u{_kind}", f"u{_kind}", "u32")
    _add(f"shr.s{_kind}", _right(f"s{_kind}"), f"s{_kind}", f"s{_kind}", "u32")
_add("shf.l.wrap.b32", _funnel_left, "b32", "b32", "b32", "u32")
_add("shf.r.wrap.b32", _funnel_right, "b32", "b32", "b32", "u32")
_add("prmt.b32", _permuted, "b32", "b32", "b32", "b32")

# Moves and conversions, 9.7.9. Integers are cut off or extended, by their sign if they have
# one. Vectors of registers are taken apart and put together by the machine.


def _converted(to, kind):
    return _typed(kind, lambda a: a.astype(TYPES[to]))


def _one_nan(function, kind):
    """The function of floats, whose NaNs are all one: so an H200 leaves them."""
    nan = (1 << 8 * TYPES[kind].itemsize - 1) - 1

    def run(a):
        made = function(a)
        bits = made.view(f"u{made.itemsize}")
        return np.where(np.isnan(made.astype(np.float32)), bits.dtype.type(nan), bits)

    return run


for _kind in ("u16", "b16", "u32", "b32", "u64", "b64", "pred", "s32", "s64", "f32"):
    _add(f"mov.{_kind}", lambda a: a, _kind, _kind)
for _to in INTEGERS:
    for _kind in INTEGERS:
        _add(f"cvt.{_to}.{_kind}", _converted(_to, _kind), _to, _kind)
for _kind in ("f16", "bf16"):
    _narrowed = _one_nan(lambda a, to=TYPES[_kind]: a.astype(to), _kind)
    _add(f"cvt.rn.{_kind}.f32", _typed("f32", _narrowed), _kind, "f32")
_widened = _one_nan(lambda a: a.astype(np.float32), "f32")
_add("cvt.f32.f16", _typed("f16", _widened), "f32", "f16")
_add("cvt.f32.bf16", _converted("f32", "bf16"), "f32", "bf16")

# Floats, 9.7.3. Denormals are kept where the opcode does not end in ".ftz".


def flushed(x):
    """Denormals as zeros of their sign, which ".ftz" and atomic additions make of them."""
    tiny = np.finfo(x.dtype).smallest_normal
    return np.where(np.abs(x) < tiny, np.copysign(x.dtype.type(0), x), x)


def _canonical(x):
    return np.where(np.isnan(x), NAN.view(np.float32), x)


def summed(a, b):
    """The sum of float32, rounded to nearest; NaNs are all one."""
    with np.errstate(invalid="ignore", over="ignore"):
        return _canonical(a + b)


def _product_f32(a, b):
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        return _canonical(a * b)


for _name in ("add.f32", "add.rn.f32"):
    _add(_name, _typed("f32", summed), "f32", "f32", "f32")
for _name in ("sub.f32", "sub.rn.f32"):
    _add(_name, _typed("f32", lambda a, b: summed(a, -b)), "f32", "f32", "f32")
for _name in ("mul.f32", "mul.rn.f32"):
    _add(_name, _typed("f32", _product_f32), "f32", "f32", "f32")
_add("neg.f32", _typed("f32", _one_nan(operator.neg, "f32")), "f32", "f32")
_add("abs.f32", _typed("f32", _one_nan(np.abs, "f32")), "f32", "f32")
_magnitude = _one_nan(lambda a: np.abs(flushed(a)), "f32")
_add("abs.ftz.f32", _typed("f32", _magnitude), "f32", "f32")

# What the lanes of a warp tell each other, 9.7.9.6 and 9.7.13. All of them take part.


def _shuffled(place):
    """Another lane's number, of the segment and up to the lane that the last two say."""

    def run(a, by, bounds, mask):
        _check_whole(mask)
        segment, clamp = bounds >> U32(8) & U32(31), bounds & U32(31)
        lowest = NUMBERS & segment
        last = lowest | clamp & ~segment & 31
        there, is_inside = place((by & U32(31)).astype(np.int64), lowest, last, segment)
        return a[np.where(is_inside, there, NUMBERS) & 31]

    return run


def _check_whole(mask):
    if (mask != U32(0xFFFFFFFF)).any():
        raise NotImplementedError("lanes that take no part in what a warp does at once")


def _up(by, lowest, last, segment):
    return NUMBERS - by, NUMBERS - by >= last


def _down(by, lowest, last, segment):
    return NUMBERS + by, NUMBERS + by <= last


def _across(by, lowest, last, segment):
    return NUMBERS ^ by, (NUMBERS ^ by) <= last


def _at(by, lowest, last, segment):
    there = lowest | by & ~segment & 31
    return there, there <= last


for _name, _place in (("up", _up), ("down", _down), ("bfly", _across), ("idx", _at)):
    _kinds = "b32", "b32", "u32", "u32", "u32"
    _add(f"shfl.sync.{_name}.b32", _shuffled(_place), *_kinds)


def _reduced(kind, reduce):
    def run(a, mask):
        _check_whole(mask)
        return np.full(LANES, reduce(a.view(TYPES[kind]))).view(U32)

    return run


for _kind in ("u32", "s32"):
    for _name, _reduce in (("add", np.add), ("min", np.minimum), ("max", np.maximum)):
        _function = _reduced(_kind, lambda a, f=_reduce: f.reduce(a, dtype=a.dtype))
        _add(f"redux.sync.{_name}.{_kind}", _function, _kind, _kind, "u32")
for _name in ("and", "or", "xor"):
    _reduce = getattr(np, f"bitwise_{_name}").reduce
    _add(f"redux.sync.{_name}.b32", _reduced("u32", _reduce), "b32", "b32", "u32")
