"""The ways that cases go, and a few programs by which they go all of them.

Small arrays cost the least to try, and mostly go densely: what is never run cannot fail. So
each case says which way it went, the ways that matter are listed here, and whoever runs
many cases asserts that each was gone.

A sum may go densely, or by entries in one round or several, and come back in as many.
Messages to owners are others on CPUs and on GPUs; so are those to all. A message may be
full to its last entry. Lists of rows go to owners unless one of them is too full, and are
merged by flags or by a sort. What reads messages reads every index code.
"""

from collections.abc import Iterable, Mapping

import numpy as np

from pallas_kernels import platforms, striping
from sparsejax.schemes.base import Traffic
from sparsejax.schemes.forecast import room_of
from sparsejax.wire.index_codes import CODES
from tests import helpers
from tests.fuzz.data import owner_of
from tests.fuzz.pool import LAWS, Program


KINDS = ("owners", "owners, for GPUs")
OF_OWNERS = (
    "densely",
    "by entries",
    "by entries of several blocks",
    "in several rounds",
    "in full messages",
    "sums by entries",
    "sums in several rounds",
)
BY_CODE = ("reference", "tiles", "whole")
NEEDED = {
    "sum": (
        *(f"{kind}: {way}" for kind in KINDS for way in OF_OWNERS),
        *(f"to all: {way}" for way in ("densely", "by entries", "in several rounds")),
    ),
    "tree": ("by entries",),
    "chosen": ("by entries",),
    "entries": ("some left out", "some added up"),
    "rows": (
        *("some left out", "some added up", "by owners", "too full for owners"),
        *("merged by flags", "merged by a sort"),
    ),
    "messages": (*(f"{name}: {code}" for name in BY_CODE for code in CODES), "lists"),
}

# Their units are those of the striped hash, whose owners `data` knows.
STRIPED = ("balanced_coo", "balanced_bitmap", "balanced_capacity")
ALMOST = 1 - 1e-6  # bytes are float32

CHOSEN = (
    # Parts of three blocks of 256 slots, tiles of 16 entries, messages of many sizes.
    Program("sum", "balanced", 3, (2039,), ladder="many sizes"),
    Program("sum", "balanced", 3, (3001,), room=4),
    Program("sum", "balanced", 2, (513, 3), room=20, narrow=True),
    Program("sum", "balanced", 3, (2047,), room=4, gpu=True),
    Program("sum", "balanced", 2, (1024,), room=4, gpu=True),
    Program("sum", "ag_sparse", 3, (2039,), ladder="many sizes"),
    Program("tree", "balanced", 3, (2039,), tree="with a bias"),
    Program("chosen", "OkTopk", 4, (1023,), steps=3),
    Program("entries", "balanced", 3, (2039,), listed=40),
    # Lists of one owner that are longer than its messages; many rows to one that is listed.
    Program("rows", "balanced", 8, (2003, 3), listed=40),
    Program("rows", "balanced", 7, (5003, 4), listed=65),
    Program("rows", "ag_sparse", 2, (5003, 3), listed=5),
    Program("rows", "ag_sparse", 2, (257, 4), listed=32),
    *(
        Program("messages", reader, case=f"mixed, {code}")
        for reader in BY_CODE
        for code in CODES
    ),
    Program("messages", "lists", case="coo8"),
)


def chosen(law: str | None = None) -> list[Program]:
    """Programs of a law, or of all, by which cases go every way that is needed."""
    return [program for program in CHOSEN if law in (None, program.law)]


def missing(gone: Mapping[tuple[str, str], int], laws: Iterable[str] = LAWS) -> list[str]:
    """The ways that are needed of these laws, and that no case went."""
    needed = [(law, way) for law in laws for way in NEEDED[law]]
    return [f"{law}: {way}" for law, way in needed if not gone.get((law, way))]


def of_sum(program: Program, x: np.ndarray, traffic: Traffic) -> set[str]:
    """The ways of a sum of x [ranks, units, ...]."""
    n, units = x.shape[:2]
    kind = _kind(program)
    if n == 1 or not x.size or kind is None:
        return set()
    push, pull = traffic.push, traffic.pull
    sent = float(push.wire + pull.wire)
    if not sent:
        return {f"{kind}: nothing is sent"}
    if sent >= ALMOST * float(traffic.dense):
        return {f"{kind}: densely"}
    gone = {"by entries"}
    if striping.width(units, n) > 256:
        gone.add("by entries of several blocks")
    if push.rounds > 1:
        gone.add("in several rounds")
    if program.room and program.scheme.startswith("balanced"):
        there = helpers.is_nonzero(x).reshape(n, units, -1).any(2)
        parts = [there[:, owner_of(units, n) == part].sum(1).max() for part in range(n)]
        gone |= {"in full messages"} if max(parts) % program.room == 0 else set()
    # Sums that come back whole have nothing that they do not need.
    if float(pull.payload) < ALMOST * float(pull.wire):
        gone.add("sums by entries")
        gone |= {"sums in several rounds"} if pull.rounds > 1 else set()
    return {f"{kind}: {way}" for way in gone}


def _kind(program):
    name = program.scheme
    if name.startswith("ag_sparse"):
        return "to all"
    if name != "balanced" and not name.startswith(STRIPED):
        return None
    return "owners, for GPUs" if program.gpu else "owners"


def of_bytes(wire: float, dense: float) -> set[str]:
    """The way of what was sent, where nothing else is known of it."""
    if not dense:
        return set()
    return {"by entries"} if float(wire) < ALMOST * float(dense) else {"densely"}


def of_ids(ids: np.ndarray, units: int) -> set[str]:
    """What becomes of ids [ranks, listed] of so many units."""
    inside = [row[(row >= 0) & (row < units)] for row in ids]
    gone = set()
    if sum(map(len, inside)) < ids.size:
        gone.add("some left out")
    if any(len(np.unique(row)) < len(row) for row in inside):
        gone.add("some added up")
    return gone


def of_rows(program: Program, ids: np.ndarray) -> set[str]:
    """The ways of lists of rows, with ids [ranks, listed]."""
    (n, listed), (height, width) = ids.shape, program.shape
    gone = of_ids(ids, height)
    if not listed or not height or not width:
        return gone
    if n == 1 or program.scheme.startswith("ag_sparse"):
        by_flags = height <= platforms.policy().flags * listed
        gone.add("merged by flags" if by_flags else "merged by a sort")
    elif program.scheme == "balanced" or program.scheme.startswith(STRIPED):
        inside = [np.unique(row[(row >= 0) & (row < height)]) for row in ids]
        owners = owner_of(height, n)
        fullest = max(np.bincount(owners[row.astype(int)]).max(initial=0) for row in inside)
        fits = fullest <= room_of(listed, n, striping.width(height, n))
        gone.add("by owners" if fits else "too full for owners")
    return gone
