"""Schedules of described GPUs: what lies between two ends of a collective, and the time."""

import math

import pytest

from benchmarks.device import hlo
from benchmarks.schedule.timeline import Costs, Timeline


PLACE = "jit(step)/shard_map/"
TEXT = """HloModule step, is_scheduled=true

%product (a: f32[8,4], b: f32[4,2]) -> f32[8,2] {
  %a = f32[8,4]{1,0} parameter(0)
  %b = f32[4,2]{1,0} parameter(1)
  ROOT %dot = f32[8,2]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: f32[8,4], w: f32[4,2], g: f32[100], h: f32[100]) -> f32[8,2] {
  %x = f32[8,4]{1,0} parameter(0)
  %w = f32[4,2]{1,0} parameter(1)
  %g = f32[100]{0} parameter(2)
  %h = f32[100]{0} parameter(3)
  FIRST
  %forward = f32[8,2]{1,0} fusion(%x, %w), kind=kCustom, calls=%product, metadata={op_name="PLACEjvp(block 0)/dot_general"}
  LAST
  %behind = f32[100]{0} copy(%done), metadata={op_name="PLACEtranspose(jvp(block 0))/add"}
  ROOT %loss = f32[1]{0} all-reduce(%behind), replica_groups={{0,1}}, metadata={op_name="PLACEpsum"}
}
"""  # noqa: E501
START = (
    "%start = ((f32[100]{0}), f32[100]{0}) all-reduce-start(%g), replica_groups={{0,1}}, "
    'metadata={op_name="PLACEreduce blocks/1/psum"}'
)
DONE = "%done = f32[100]{0} all-reduce-done(%start)"
# A sum of 400 bytes takes a second, the product two.
COSTS = Costs(rate=3200, latency=0, flops=64, memory=math.inf, launch=0.5)


def timeline(first, last):
    text = TEXT.replace("FIRST", first).replace("LAST", last)
    return Timeline.of(hlo.parse(text.replace("PLACE", PLACE)))


def test_a_forward_between_start_and_done_hides_the_reduction():
    found, loss = timeline(START, DONE).reductions(COSTS)
    assert found.what == "reduction of blocks/1"
    assert found.sent == 400
    assert found.between == {"forward of block 0": (128.0, 1)}
    assert found.free == 128  # neither needs the other
    assert (found.seconds, found.waited) == (1, 0)
    assert (loss.what, loss.seconds, loss.waited) == ("reduction", 1, 1)
    # The forward, what follows, and the loss's sum.
    assert timeline(START, DONE).total(COSTS) == 2 + 0.5 + 1
    assert timeline(START, DONE).waiting(COSTS) == 1


@pytest.mark.parametrize("first", [START + "\n  " + DONE, None])
def test_without_a_forward_between_the_device_waits(first):
    """Where the ends are next to each other, and where XLA prints both as one."""
    alone = START.replace("all-reduce-start", "all-reduce").replace("%start", "%done")
    one = timeline(first or alone, "")
    found = one.reductions(COSTS)[0]
    assert found.between == {}
    assert found.free == 128
    assert (found.seconds, found.waited) == (1, 1)
    assert one.total(COSTS) == 1 + 2 + 0.5 + 1


BRANCHES = """HloModule step, is_scheduled=true

%some (a: f32[100]) -> f32[100] {
  %a = f32[100]{0} parameter(0)
  ROOT %few = f32[100]{0} all-to-all(%a), replica_groups={{0,1}}, metadata={op_name="PLACEprior rows/all_to_all"}
}

%all (b: f32[100]) -> f32[100] {
  %b = f32[100]{0} parameter(0)
  %twice = f32[200]{0} concatenate(%b, %b), dimensions={0}
  %many = f32[200]{0} all-to-all(%twice), replica_groups={{0,1}}, metadata={op_name="PLACEprior rows/all_to_all"}
  ROOT %part = f32[100]{0} slice(%many), slice={[0:100]}
}

%turn (c: f32[100]) -> f32[100] {
  %c = f32[100]{0} parameter(0)
  %first = f32[100]{0} negate(%c)
  ROOT %second = f32[100]{0} negate(%first)
}

ENTRY %main (i: s32[], x: f32[100]) -> f32[100] {
  %i = s32[] parameter(0)
  %x = f32[100]{0} parameter(1)
  %start = (f32[100]{0}, f32[100]{0}) all-to-all-start(%x), replica_groups={{0,1}}, metadata={op_name="PLACEdelayed rows/all_to_all"}
  %sent = f32[100]{0} conditional(%i, %x, %x), branch_computations={%some, %all}
  %loop = f32[100]{0} while(%sent), condition=%less, body=%turn, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %done = f32[100]{0} all-to-all-done(%start)
}
"""  # noqa: E501


@pytest.mark.parametrize(("share", "sent"), [(0.5, 200), (0.6, 400)])
def test_of_branches_that_send_the_one_runs_that_sends_the_stated_share(share, sent):
    one = Timeline.of(hlo.parse(BRANCHES.replace("PLACE", PLACE)), share)
    delayed, prior = one.reductions(COSTS)
    assert (delayed.what, delayed.sent) == ("exchange of delayed rows", 200)
    assert (prior.what, prior.sent) == ("exchange of prior rows", sent)
    (loop,) = (step for step in one.steps if step.name == "loop")
    assert loop.launches == 10  # two kernels in each of five turns
    assert loop.after >= {prior.name, "sent", "x"}
    assert delayed.name not in loop.after
    assert one.seconds(COSTS)["loop"] == 10 * COSTS.launch
