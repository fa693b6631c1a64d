"""Buckets: which leaves are exchanged as one array, by which scheme, in which unit."""

from sparsejax.transforms.buckets.assignment import (
    SPARSE_FROM as SPARSE_FROM,
    Assignment as Assignment,
    ByRules as ByRules,
    ByTables as ByTables,
    Everything as Everything,
    Rules as Rules,
    check_ids as check_ids,
    check_rules as check_rules,
    is_part as is_part,
    of_part as of_part,
)
from sparsejax.transforms.buckets.bucket import Bucket as Bucket
