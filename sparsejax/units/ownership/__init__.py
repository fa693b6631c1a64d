"""Rules that assign each unit to a rank, one file each; `base` is their protocol."""

from sparsejax.units.ownership.base import Layout as Layout, Ownership as Ownership
from sparsejax.units.ownership.murmur import MurmurHash as MurmurHash
from sparsejax.units.ownership.ranges import Contiguous as Contiguous
from sparsejax.units.ownership.striped import StripedHash as StripedHash
