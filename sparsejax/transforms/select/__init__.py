"""A sparsifier on a tree, and the checks of what it is given."""

from sparsejax.transforms.select.checks import (
    check_shards as check_shards,
    require_local as require_local,
)
from sparsejax.transforms.select.selecting import (
    Select as Select,
    SelectState as SelectState,
)
