"""A reader of compiled programs: their collectives, and the mesh axes of these."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from benchmarks.device import hlo


OPCODES = {
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
}


class Compiled(NamedTuple):
    """One collective of a compiled program.

    Attributes:
        opcode: Its opcode, without `-start`.
        axes: The mesh axes over which it communicates.
        arrays: The arrays that it returns.
        size: The number of elements of its operands or of its results, the larger one.
        path: The branches and loops around it, outermost first.
        operands: The opcodes that computed its operands, before copies and reshapes.
    """

    opcode: str
    axes: frozenset[str]
    arrays: tuple[hlo.Array, ...]
    size: int
    path: tuple[str, ...]
    operands: tuple[str, ...]


def compiled_collectives(compiled: Any, mesh: Mesh) -> list[Compiled]:
    """Returns the collectives of a compiled program that are over several devices.

    Args:
        compiled: The result of `jax.jit(...).lower(...).compile()`.
        mesh: Its mesh.
    """
    program = hlo.parse(compiled.as_text())
    found = list(_walk(program, program.entry, (), mesh))
    return [one for one in found if one.axes]


def _walk(program, computation, path, mesh) -> Iterator[Compiled]:
    for instruction in computation.instructions.values():
        opcode = instruction.opcode.removesuffix("-start")
        if opcode in OPCODES:
            given = computation.given(instruction)
            yield Compiled(
                opcode,
                axes_of(instruction.rest, mesh),
                instruction.arrays,
                max(_size([instruction]), _size(given)),
                path,
                tuple(_source(computation, x).opcode for x in given),
            )
        inner = {
            "while": ("condition", "body"),
            "call": ("to_apply",),
            "async": ("calls",),
            "fusion": ("calls",),
        }.get(opcode, ())
        names = [instruction.called(name) for name in inner] + [*instruction.branches]
        step = () if opcode in ("call", "async", "fusion") else (opcode,)
        for name in filter(None, names):
            yield from _walk(program, program.computations[name], (*path, *step), mesh)


def _size(instructions):
    return sum(int(np.prod(x.shape)) for one in instructions for x in one.arrays)


def _source(computation, instruction):
    """Returns the instruction that computed a value, before copies and reshapes."""
    while instruction.opcode in ("bitcast", "convert", "copy", "reshape", "transpose"):
        (instruction,) = computation.given(instruction)
    return instruction


def axes_of(text: str, mesh: Mesh) -> frozenset[str]:
    """Returns the mesh axes along which the devices of a group differ.

    Args:
        text: The attributes of a collective.
        mesh: The mesh.
    """
    places = np.arange(mesh.size).reshape(mesh.devices.shape)
    found = set()
    for group in groups_of(text, mesh.size):
        at = np.stack(np.unravel_index(group, places.shape))
        differ = (at != at[:, :1]).any(1)
        found |= {name for name, one in zip(mesh.axis_names, differ, strict=True) if one}
    return frozenset(found)


def groups_of(text: str, devices: int) -> list[list[int]]:
    """Returns the groups of a collective, from any of the forms in which XLA writes them.

    Args:
        text: The attributes of the instruction.
        devices: The number of devices.
    """
    if listed := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}", text):
        groups = re.findall(r"\{([\d,]+)\}", listed[1])
        return [[int(i) for i in group.split(",")] for group in groups]
    if "replica_groups={}" in text:
        return [list(range(devices))]
    if iota := re.search(
        r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", text
    ):
        return _iota(iota[2]).reshape(_numbers(iota[1])).tolist()
    named = re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^ ]*)\))? ?\{([^}:]*)\}", text
    )
    if named is None:
        raise AssertionError(f"no replica groups that are known in {text!r}")
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
    ids = _iota(named[2] or f"[{devices}]").reshape([*sizes.values()])
    over = [[*sizes].index(name) for name in re.findall(r"'(\w+)'", named[3])]
    last = range(-len(over), 0)
    count = int(np.prod([ids.shape[at] for at in over]))
    return np.moveaxis(ids, over, last).reshape(-1, count).tolist()


def _iota(text):
    """Returns the device ids of `[4,2]T(1,0)`: an iota of that shape, transposed, flat."""
    sizes, permuted = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text).groups()
    sizes = _numbers(sizes)
    ids = np.arange(np.prod(sizes)).reshape(sizes)
    return (ids.transpose(_numbers(permuted)) if permuted else ids).ravel()


def _numbers(text):
    return [int(number) for number in text.split(",")]


def kernels(compiled: Any) -> set[str]:
    """Returns the fused kernels of a compiled program, without the names in them.

    XLA:CPU compiles equal ones once.
    """
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in compiled.as_text().splitlines():
        if head := re.match(r"%(\S+) \(.*\{$", line):
            lines = found.setdefault(head[1], [])
        else:
            lines.append(line)
    called = re.findall(r" fusion\(.*calls=%([\w.-]+)", compiled.as_text())
    return {_nameless("\n".join(found[name])) for name in called}


def _nameless(text):
    names: dict[str, str] = {}
    text = re.sub(r", (metadata|frontend_attributes|backend_config)=\{.*", "", text)
    return re.sub(r"%[\w.-]+", lambda at: names.setdefault(at[0], f"%{len(names)}"), text)
