"""The transport of units: all collectives, messages of several sizes, and index codes."""

from sparsejax.axes import AxisName as AxisName
from sparsejax.wire.channels import Channel as Channel
from sparsejax.wire.collectives import (
    Permutation as Permutation,
    Wire as Wire,
    all_reduce_bytes as all_reduce_bytes,
    all_reduce_cost as all_reduce_cost,
    travelling as travelling,
)
from sparsejax.wire.gathers import doubling_schedule as doubling_schedule
