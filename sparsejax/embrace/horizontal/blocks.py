"""Blocks: groups of leaves whose gradients are reduced together, found from their paths.

Without a given order, a block contains the leaves below the first numbered key of a path,
such as `encoder/layer_3`, since models number repeated layers; if no key is numbered, it
contains the leaves of one parent, such as `head/kernel` and `head/bias`.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

from sparsejax.errors import ArgumentError


#: Path prefixes, several for one block in a tuple; or a function from paths to these.
Order = Sequence[str | tuple[str, ...]]

_NUMBERED = re.compile(r".*\d")


@dataclasses.dataclass(frozen=True)
class Block:
    """A group of leaves that are reduced together.

    Attributes:
        name: The path prefixes of the block, joined by ", ".
        paths: The paths of its leaves.
    """

    name: str
    paths: tuple[str, ...]


def cut(paths: Sequence[str], order: Order | Callable[..., Order] | None) -> list[Block]:
    """Returns the blocks of all leaves, in the given order or in that of first leaves.

    Args:
        paths: The paths of the leaves that are carried.
        order: Path prefixes, or a function from the paths to these. None: see the module.
    """
    if order is None:
        members: dict[str, list[str]] = {}
        for path in paths:
            members.setdefault(_name(path), []).append(path)
        return [Block(name, tuple(inside)) for name, inside in members.items()]
    if callable(order):
        order = order(list(paths))
    check(order)
    wanted: dict[str, tuple[str, ...]] = {}
    for entry in order:
        prefixes = (entry,) if isinstance(entry, str) else tuple(entry)
        name = ", ".join(prefixes)
        if name in wanted:
            raise ArgumentError(f"order names the block {name!r} twice: name it once.")
        wanted[name] = prefixes
    return _by_name(wanted, paths)


def among(names: Sequence[str], paths: Sequence[str], what: str) -> list[bool]:
    """Returns for each path whether it begins with a prefix; raises if one matches none.

    Args:
        names: The prefixes.
        paths: The paths.
        what: The name of the argument, for the error.
    """
    for name in names:
        if not any(_begins(path, name) for path in paths):
            raise ArgumentError(
                f"{what} names {name!r}, and no leaf has a path that begins so. The leaves "
                f"are: {_listed(paths)}."
            )
    return [any(_begins(path, name) for name in names) for path in paths]


def ordered(blocks: Sequence[Block], names: Sequence[str]) -> list[Block]:
    """Returns the blocks in the order of `names`, which must have each name once."""
    by_name = {block.name: block for block in blocks}
    if sorted(by_name) != sorted(names):
        raise ArgumentError(
            f"the order is of the blocks {_listed(names)}, and those of the state are "
            f"{_listed(list(by_name))}: find it for the parameters that are trained."
        )
    return [by_name[name] for name in names]


def _by_name(wanted, paths):
    """Returns the blocks of prefixes, by their names; raises unless each leaf is in one."""
    members: dict[str, list[str]] = {name: [] for name in wanted}
    missed = []
    for path in paths:
        found = [n for n, some in wanted.items() if any(_begins(path, p) for p in some)]
        if len(found) > 1:
            raise ArgumentError(
                f"order has the leaf {path!r} in two blocks, {found[0]!r} and "
                f"{found[1]!r}: its gradient is reduced once. Take one of them out, or "
                "name longer prefixes."
            )
        if found:
            members[found[0]].append(path)
        else:
            missed.append(path)
    empty = [name for name, inside in members.items() if not inside]
    if empty:
        raise ArgumentError(
            f"order names the block {empty[0]!r}, and no leaf that is carried has a path "
            f"that begins so. Those leaves are: {_listed(paths)}."
        )
    if missed:
        raise ArgumentError(
            f"order misses {_listed(missed)}: their gradients would never be reduced. Add "
            "the blocks that they are in, or name them in at_once, whose leaves are "
            "updated at the end of each step."
        )
    return [Block(name, tuple(inside)) for name, inside in members.items()]


def check(order: Any) -> None:
    """Raises unless it lists path prefixes."""
    is_text = lambda entry: isinstance(entry, str) and entry
    good = isinstance(order, (list, tuple)) and all(
        is_text(entry)
        or (isinstance(entry, (list, tuple)) and entry and all(map(is_text, entry)))
        for entry in order
    )
    if not good:
        raise ArgumentError(
            "order must list the blocks in the order in which a forward uses them, each "
            "the beginning of its leaves' paths, as ['embed', 'layers/0', ('norm', "
            f"'head')], or be a function from paths to such a list; got {order!r}."
        )


def _begins(path, prefix):
    return path == prefix or path.startswith(prefix.rstrip("/") + "/")


def _name(path):
    """Returns the name of the block of a leaf without a given order."""
    *keys, _ = path.split("/")
    for at, key in enumerate(keys):
        if _NUMBERED.fullmatch(key):
            return "/".join(keys[: at + 1])
    return "/".join(keys) or path


def _listed(paths: Sequence[str], most: int = 12) -> str:
    texts = [repr(path) for path in paths[:most]]
    more = len(paths) - most
    return ", ".join(texts) + (f" and {more} more" if more > 0 else "")
