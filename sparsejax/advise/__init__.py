"""Tools to choose a synchronization: profiles, plans, forecasts, and measured times.

`sparsejax` itself exports `explain`, `doctor`, `check_job`, `profile`, `make_plan` and
`Plan`. This package exports the entry of a plan, profiles of a running synchronization,
times for each number of SparDL's teams, DRAGONN's choice of tensors, the check of a job's
coordinator, and the watch over a job's processes.
"""

from sparsejax.advise.plan import LeafPlan as LeafPlan
from sparsejax.advise.profile import profile_from_state as profile_from_state
from sparsejax.advise.teams import measure_teams as measure_teams
from sparsejax.advise.tensors import (
    CompressionCost as CompressionCost,
    measure_compression as measure_compression,
    worthwhile as worthwhile,
)
from sparsejax.jobs.start.coordinator import check_coordinator as check_coordinator
from sparsejax.jobs.watch.context import watch_job as watch_job
