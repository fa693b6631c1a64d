"""Where lanes that took different ways at a branch go together again.

At the nearest instruction that all of them come to: the branch's immediate postdominator.
`ptxas` makes them meet there, too, or later.
"""

from tests.ptx.machine.program import Program


def joins(program: Program, targets: dict[int, int]) -> dict[int, int]:
    """For each branch that a predicate decides, the instruction where its ways meet.

    Args:
        program: The program.
        targets: Where each branch goes.
    """
    end = len(program.instructions)
    after = []
    for number, one in enumerate(program.instructions):
        to = targets.get(number)
        if one.opcode == "ret":
            after.append([end])
        elif to is None:
            after.append([number + 1])
        else:
            after.append([to] if one.predicate is None else [number + 1, to])
    starts = sorted(
        {0, end, *(x for way in after if len(way) > 1 for x in way)}
        | {x for n, way in enumerate(after) for x in way if x != n + 1}
    )
    # Of each instruction all that every way from it passes, until nothing changes.
    passed = {end: {end}}
    changed = True
    blocks = [(begin, _last(begin, starts, after, end)) for begin in starts if begin != end]
    while changed:
        changed = False
        for begin, last in reversed(blocks):
            known = [passed[to] for to in after[last] if to in passed]
            if not known:
                continue
            found = {begin} | set.intersection(*known)
            if passed.get(begin) != found:
                passed[begin], changed = found, True
    done = {}
    for number, ways in enumerate(after):
        if len(ways) > 1:
            common = set.intersection(*(passed.get(to, {end}) for to in ways))
            # The nearest of those that all ways pass is the one that passes the others.
            done[number] = max(common, key=lambda x: len(passed.get(x, ())))
    return done


def _last(begin, starts, after, end):
    """The last instruction of the straight line that begins there."""
    number = begin
    while after[number] == [number + 1] and number + 1 not in starts and number + 1 < end:
        number += 1
    return number
