"""Helpers of tests: runs over ranks, an oracle in NumPy, inputs, a reader of jaxprs."""

import pytest

from tests.helpers.conservation import assert_conserved as assert_conserved, held as held
from tests.helpers.hlo import (
    axes_of as axes_of,
    compiled_collectives as compiled_collectives,
    groups_of as groups_of,
    kernels as kernels,
)
from tests.helpers.inputs import (
    adversarial_sets as adversarial_sets,
    gradients as gradients,
    strided_set as strided_set,
    zipf_set as zipf_set,
)
from tests.helpers.loads import before_messages as before_messages, fullest_of as fullest_of
from tests.helpers.meshes import (
    AXIS as AXIS,
    KINDS as KINDS,
    auto as auto,
    described as described,
    grid as grid,
    mesh_of as mesh_of,
    partial_sums as partial_sums,
    placed as placed,
    shard_map as shard_map,
)
from tests.helpers.oracle import (
    assert_within as assert_within,
    is_nonzero as is_nonzero,
    packed as packed,
    places_of as places_of,
    total as total,
    unpacked as unpacked,
)
from tests.helpers.programs import (
    Collective as Collective,
    collective_equations as collective_equations,
    collectives as collectives,
    equations as equations,
    every_platform as every_platform,
    for_gpus as for_gpus,
    rounds_of as rounds_of,
    scatters as scatters,
    sent_bytes as sent_bytes,
    traced_collectives as traced_collectives,
    traced_for as traced_for,
)
from tests.helpers.rows import (
    assert_sum_of_rows as assert_sum_of_rows,
    drawn_rows as drawn_rows,
    listed_ids as listed_ids,
    of_one_owner as of_one_owner,
)
from tests.helpers.runs import (
    WIRE as WIRE,
    Run as Run,
    assert_same_on_all_ranks as assert_same_on_all_ranks,
    call as call,
    compilations as compilations,
    first_state as first_state,
    init as init,
    is_replicated as is_replicated,
    octets as octets,
    parameters as parameters,
    ranked as ranked,
    ranks as ranks,
    run_ranks as run_ranks,
    stacked as stacked,
)


def slow(*values):
    """Marks values of a parameter, or tuples of values, as those of slow tests."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow
        )
        for value in values
    ]


def mostly_slow(table, *names):
    """Returns the cases of a table, with all but these names marked as slow."""
    return [*names, *slow(*(name for name in table if name not in names))]
