"""What is read of the thunks that XLA prints: which are in a CUDA graph, which are not."""

import pytest

from benchmarks.device import ceilings, graphs
from benchmarks.device.hlo import ProgramError


# As XLA prints them: names of branches are indented as far as they please.
WHOLE = """
000: kCommandBuffer [source | sink]
    001: kCustomKernel [source       | next=002 (1)] loop_fusion grid: [1, 1, 1]
    002: kConditional  [prev=001 (1) | sink        ]
      branch_0:
        003: kAsyncStart   [source       | sink] stream=communication_stream[0], async_id=3
            004: kAllToAll [source | sink] kAllToAll
        005: kAsyncDone    [source       | sink] async_id=3
      branch_1:
        006: kWhile        [source       | sink]
condition:
            007: kCustomKernel [source | sink] loop_fusion_1 grid: [1, 1, 1]
          body:
            008: kDynamicSliceFusion [source | sink] params=1, results=1
                009: kCopy [source | sink] kCopy
"""
IN_PIECES = """
000: kCommandBuffer [source | next=003 (1)]
    001: kCustomKernel [source       | next=002 (1)] loop_fusion grid: [1, 1, 1]
    002: kCopy         [prev=001 (1) | sink] kCopy
003: kAsyncStart    [prev=000 (1) | next=005 (1)] stream=communication_stream[0], async_id=3
    004: kAllReduce [source | sink] kAllReduce
005: kAsyncDone     [prev=003 (1) | sink] async_id=3
006: kConditional   [prev=003 (1) | sink]
  false_branch:
    000: kCommandBuffer [source | sink]
        007: kCustomKernel [source | sink] loop_fusion_1 grid: [1, 1, 1]
  true_branch:
    008: kWhile         [source | sink]
condition:
        009: kCustomKernel [source | sink] loop_fusion_2 grid: [1, 1, 1]
      body:
        000: kCommandBuffer [source | sink]
            010: kCustomKernel [source | sink] loop_fusion_3 grid: [1, 1, 1]
        011: kAllReduce    [source | sink] kAllReduce
"""


def test_a_step_that_is_one_graph_asks_nothing():
    found = graphs.Graphs.of(WHOLE)
    # Two kernels, a copy and a collective.
    assert found == graphs.Graphs(captured=4, outside={}, asks=0, graphs=1)
    assert found.whole
    assert ceilings.left_outside("zen", found) == []


def test_what_is_between_graphs_is_counted_by_its_kind():
    found = graphs.Graphs.of(IN_PIECES)
    outside = {"kAllReduce": 2, "kCustomKernel": 1}
    assert found == graphs.Graphs(captured=4, outside=outside, asks=2, graphs=3)
    (line,) = ceilings.left_outside("zen", found)
    assert "3 CUDA graphs, not one: 2 kAllReduce, 1 kCustomKernel is launched" in line
    assert "2 conditionals and loops ask the host" in line


@pytest.mark.parametrize("passes", ["", "_after_thunk_passes"])
def test_the_sequence_that_xla_prints_is_looked_for_where_it_was_told_to(passes):
    """Where passes change nothing it prints what was there before alone."""
    name = f"module_1.jit_run.thunk_sequence{passes}.txt"
    with graphs.printed(graphs.ALL) as (options, found):
        assert options["xla_gpu_enable_command_buffer"].endswith("CONDITIONAL,WHILE")
        with open(f"{options['xla_dump_to']}/{name}", "w") as file:
            file.write(WHOLE)
    assert found == [graphs.Graphs.of(WHOLE)]
    with (
        pytest.raises(ProgramError, match="printed 0 sequences"),
        graphs.printed(graphs.ALL),
    ):
        pass
