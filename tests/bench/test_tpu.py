"""What is read of a program for TPUs, and the ceilings that it may exceed."""

import pytest

from benchmarks.tpu import compiled, steps
from benchmarks.tpu.compiled import Found


PROGRAM = """
HloModule jit_run, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[]{:T(128)} parameter(0)
  %b = f32[]{:T(128)} parameter(1)
  ROOT %sum = f32[]{:T(128)} add(%a, %b)
}

%fused (x: f32[1000,16], i: s32[40,1], v: f32[40,16]) -> f32[1000,16] {
  %x = f32[1000,16]{1,0:T(8,128)} parameter(0)
  %i = s32[40,1]{0,1:T(1,128)S(1)} parameter(1)
  %v = f32[40,16]{1,0:T(8,128)} parameter(2)
  ROOT %put = f32[1000,16]{1,0} scatter(%x, %i, %v), index_vector_dim=1, to_apply=%add
}

ENTRY %main (x: f32[1000,16], i: s32[40,1], v: f32[40,16]) -> f32[1000,16] {
  %x.1 = f32[1000,16]{0,1:T(8,128)} parameter(0)
  %i.1 = s32[40,1]{0,1:T(1,128)} parameter(1)
  %v.1 = f32[40,16]{1,0:T(8,128)} parameter(2)
  %rows = f32[1000,16]{1,0:T(8,128)} copy(%x.1)
  %marks = s32[64]{0:T(128)} broadcast(%i.1), dimensions={}
  %at = s32[50]{0:T(128)} broadcast(%i.1), dimensions={}
  %ones = s32[50]{0:T(128)} broadcast(%i.1), dimensions={}
  %flat = s32[64]{0} scatter(%marks, %at, %ones), index_vector_dim=1
  %fusion = f32[1000,16]{1,0:T(8,128)} fusion(%rows, %i.1, %v.1), kind=kCustom, calls=%fused
  ROOT %back = (f32[1000,16]{0,1}, f32[1000,16]{1,0}, u32[]) copy-start(%fusion)
}
"""


def test_updates_and_copies_are_read_off_the_text():
    updates, copied, counts = compiled.read(PROGRAM)
    assert updates == 50  # indices of a vector, and of a column
    assert compiled.read(PROGRAM.replace("s32[50]", "s32[30]"))[0] == 40
    assert copied == 16_000
    assert (counts["scatter"], counts["copy"], counts["copy-start"]) == (2, 1, 1)


FOUND = Found(1.0, 0, 100, 50, 16_000, {})


@pytest.mark.parametrize(
    ("ceilings", "said"),
    [
        ({"updates": 50, "table": 16_001, "code": 100}, []),
        ({"updates": 49}, ["has a scatter of 50 updates, ceiling 49."]),
        ({"code": 99}, ["has code of 100 bytes, ceiling 99."]),
        ({"table": 16_000}, ["copies an array of 16,000 numbers, and a table has 16,000."]),
    ],
)
def test_what_exceeds_a_ceiling_is_said(ceilings, said):
    step = steps.Step("rows", "two v5e", lambda mesh: None, **ceilings)
    assert compiled.exceeded(step, FOUND) == [f"rows, two v5e {text}" for text in said]
