"""The count of what a compiled program does, on programs small enough to count by hand."""

import pytest

from benchmarks.device import hlo, turns
from benchmarks.device.walk import Counts, Walk


KERNEL = """
%double (a: f32[256]) -> f32[256] {
  %a = f32[256]{0} parameter(0)
  ROOT %twice = f32[256]{0} add(%a, %a)
}
"""
TEST = """
%test (s: (s32[], f32[256])) -> pred[] {
  %s = (s32[], f32[256]{0}) parameter(0)
  %n = s32[] get-tuple-element(%s), index=0
  ROOT %less = pred[] fusion(%n), kind=kLoop, calls=%compared
}
%compared (m: s32[]) -> pred[] {
  %m = s32[] parameter(0)
  %c = s32[] constant(3)
  ROOT %l = pred[] compare(%m, %c), direction=LT
}
"""
FRAMES = """HloModule m, is_scheduled=true

FileNames
1 "/home/of/sums.py"
2 "/home/of/parts.py"

FunctionNames
1 "sums"
2 "Parts.add.<locals>.one"

FileLocations
1 {file_name_id=1 function_name_id=1 line=1 end_line=1 column=1 end_column=1}
2 {file_name_id=2 function_name_id=2 line=1 end_line=1 column=1 end_column=1}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

"""
OUTER, INNER = ("sums.py:sums",), ("sums.py:sums", "parts.py:Parts.add.<locals>.one")
AT_OUTER = "metadata={stack_frame_id=1}"
LOOPS = (
    FRAMES
    + KERNEL
    + TEST
    + """
%inner (s.2: (s32[], f32[256])) -> (s32[], f32[256]) {
  %s.2 = (s32[], f32[256]{0}) parameter(0)
  %n.2 = s32[] get-tuple-element(%s.2), index=0
  %x.2 = f32[256]{0} get-tuple-element(%s.2), index=1
  %y.2 = f32[256]{0} fusion(%x.2), kind=kLoop, calls=%double
  ROOT %t.2 = (s32[], f32[256]{0}) tuple(%n.2, %y.2)
}

%outer (s.3: (s32[], f32[256])) -> (s32[], f32[256]) {
  %s.3 = (s32[], f32[256]{0}) parameter(0)
  %x.3 = f32[256]{0} get-tuple-element(%s.3), index=1
  %n.3 = s32[] get-tuple-element(%s.3), index=0
  %y.3 = f32[256]{0} copy(%x.3)
  %t.3 = (s32[], /*index=1*/f32[256]{0}) tuple(%n.3, %y.3)
  ROOT %w.3 = (s32[], f32[256]{0}) while(%t.3), condition=%test, body=%inner, INSIDE
}

ENTRY %main (x: f32[256], n: s32[]) -> f32[16,16] {
  %x = f32[256]{0} parameter(0)
  %n.4 = s32[] parameter(1)
  %t = (s32[], f32[256]{0}) tuple(%n.4, %x)
  %w = (s32[], f32[256]{0}) while(%t), condition=%test, body=%outer, OUTSIDE
  %y = f32[256]{0} get-tuple-element(%w), index=1
  ROOT %z = f32[16,16]{1,0} bitcast(%y)
}
""".replace("OUTSIDE", AT_OUTER)
)
DATA = 'metadata={op_name="while" stack_frame_id=2}'
KNOWN = 'backend_config={"known_trip_count":{"n":"5"},"other":[]}'
NEVER = lambda *_: pytest.fail("nothing here is data")


def counted(text, turns=NEVER, taken=NEVER, ranks=4) -> Counts:
    return Walk(hlo.parse(text), turns, taken, ranks)()


def entry(*lines, more=KERNEL):
    """A program whose entry has these lines; x is f32[256]."""
    begin = "\nENTRY %main (x: f32[256]) -> f32[256] {\n  %x = f32[256]{0} parameter(0)\n"
    return "HloModule m\n" + more + begin + "".join(f"  {line}\n" for line in lines) + "}\n"


def test_a_loop_in_a_loop_waits_for_each_test_of_both():
    by_place = {OUTER: 3, INNER: 2}
    done = counted(LOOPS.replace("INSIDE", DATA), by_place.__getitem__)
    # Four tests of the outer loop, three of the inner one in each of three turns.
    assert done.waits == 4 + 3 * 3
    # Each test is a launch, each outer turn a copy, each inner one a kernel.
    assert done.launches == (4 + 3 * 3) + 3 + 3 * 2
    assert done.written == 1 * (4 + 3 * 3) + 1024 * (3 + 3 * 2)
    # A loop of known length waits for nothing.
    done = counted(LOOPS.replace("INSIDE", KNOWN), {OUTER: 3}.__getitem__)
    assert (done.waits, done.launches) == (4, 4 + 3 * (1 + 5))


def test_a_conditional_waits_once_and_takes_its_branches_by_their_shares():
    text = entry(
        "%i = s32[] constant(1)",
        "%t = (f32[256]{0}) tuple(%x)",
        "ROOT %c = f32[256]{0} conditional(%i, %t, %t, %t), "
        "branch_computations={%none, %one, %two}",
        more=KERNEL
        + "".join(
            f"\n%{name} (p.{n}: (f32[256])) -> f32[256] {{\n"
            f"  %p.{n} = (f32[256]{{0}}) parameter(0)\n"
            f"  %y.{n}.0 = f32[256]{{0}} get-tuple-element(%p.{n}), index=0\n"
            + "".join(
                f"  %y.{n}.{k + 1} = f32[256]{{0}} fusion(%y.{n}.{k}), kind=kLoop, "
                "calls=%double\n"
                for k in range(n)
            )
            + f"  ROOT %r.{n} = f32[256]{{0}} bitcast(%y.{n}.{n})\n}}\n"
            for n, name in enumerate(("none", "one", "two"))
        ),
    )
    done = counted(text, taken=lambda place, branches: [0.5, 0.0, 0.5])
    assert (done.waits, done.launches) == (1, 0.5 * 2)


@pytest.mark.parametrize(
    "lines",
    [
        # What computes nothing, and a kernel.
        (
            "%b = f32[16,16]{1,0} bitcast(%x)",
            "%t = (f32[16,16]{1,0}, f32[256]{0}) tuple(%b, %x)",
            "%g = f32[256]{0} get-tuple-element(%t), index=1",
            "ROOT %y = f32[256]{0} fusion(%g), kind=kLoop, calls=%double",
        ),
        # A copy in two parts.
        (
            "%s = (f32[256]{0}, f32[256]{0}, u32[]) copy-start(%x)",
            "ROOT %d = f32[256]{0} copy-done(%s)",
        ),
    ],
)
def test_an_array_is_moved_once_by_one_launch(lines):
    done = counted(entry(*lines))
    assert (done.launches, done.read, done.written) == (1, 1024, 1024)


UPDATED = """
%change (whole: f32[1000000], part: f32[256], at: s32[]) -> f32[1000000] {
  %whole = f32[1000000]{0} parameter(0)
  %part = f32[256]{0} parameter(1)
  %at = s32[] parameter(2)
  ROOT %done = f32[1000000]{0} dynamic-update-slice(%whole, %part, %at)
}
"""
TAKEN = """
%change (whole: f32[1000000], part: f32[256], at: s32[]) -> f32[8] {
  %whole = f32[1000000]{0} parameter(0)
  %half = f32[500000]{0} slice(%whole), slice={[0:500000]}
  %rows = f32[1000,500]{1,0} bitcast(%half)
  %some = f32[1,8]{1,0} slice(%rows), slice={[0:1], [0:8]}
  ROOT %done = f32[8]{0} bitcast(%some)
}
"""


@pytest.mark.parametrize(
    ("change", "made", "moved"),
    [(UPDATED, 1_000_000, (1024 + 4, 1024)), (TAKEN, 8, (32, 32))],
    ids=["updated in place", "taken"],
)
def test_of_a_large_array_only_a_slice_moves(change, made, moved):
    text = entry(
        "%w = f32[1000000]{0} constant({...})",
        "%i = s32[] constant(0)",
        f"ROOT %y = f32[{made}]{{0}} fusion(%w, %x, %i), kind=kLoop, calls=%change",
        more=change,
    )
    done = counted(text)
    assert (done.read, done.written) == moved


@pytest.mark.parametrize(("combine", "again"), [("a", 1), ("b", 0)])
def test_a_scatter_moves_what_it_changes_and_a_gather_what_it_takes(combine, again):
    """A sum reads what is there before it writes; what is set is not read."""
    root = "%r = f32[] add(%a, %b)" if again else "%b.2 = f32[] parameter(1)"
    more = f"""
%combine (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  {"%b = f32[] parameter(1)" if again else ""}
  ROOT {root}
}}

%place (whole: f32[1000000], from: f32[5000], at: s32[256,1]) -> f32[1000000] {{
  %whole = f32[1000000]{{0}} parameter(0)
  %from = f32[5000]{{0}} parameter(1)
  %at = s32[256,1]{{1,0}} parameter(2)
  %some = f32[256]{{0}} gather(%from, %at), offset_dims={{}}
  ROOT %done = f32[1000000]{{0}} scatter(%whole, %at, %some), to_apply=%combine
}}
"""
    text = entry(
        "%w = f32[1000000]{0} constant({...})",
        "%f = f32[5000]{0} constant({...})",
        "%i = s32[256,1]{1,0} constant({...})",
        "ROOT %y = f32[1000000]{0} fusion(%w, %f, %i), kind=kLoop, calls=%place",
        more=more,
    )
    done = counted(text)
    assert (done.read, done.written) == (1024 * (2 + again), 1024)


def test_what_is_not_known_is_an_error():
    with pytest.raises(hlo.ProgramError, match=r"h is a histogram.*walk\.py"):
        counted(entry("ROOT %h = f32[256]{0} histogram(%x)"))
    with pytest.raises(hlo.ProgramError, match=r"nothing is known of a loop at sums\.py"):
        counted(LOOPS.replace("INSIDE", DATA), turns.Turns({}).turns)
    with pytest.raises(hlo.ProgramError, match="no ENTRY"):
        hlo.parse("HloModule m\n")
