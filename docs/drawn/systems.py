"""The pictures of README and of the systems."""

import itertools

from drawn.card import INK, LINE, PALE, RANKS, Picture, some


def gradient():
    """README: what an all-reduce sends, and what is there."""
    picture = Picture(640, 190, "An all-reduce sends every cell, sparsejax the filled ones")
    picture.text(20, 28, "gradient of a table, on three ranks", bold=True)
    picture.text(356, 28, "lax.psum sends", bold=True)
    picture.text(506, 28, "sparsejax sends", bold=True)
    for rank in range(3):
        y = 46 + 42 * rank
        touched = some(rank + 3, 3, 16)
        color = RANKS[rank]
        row = [color if i in touched else None for i in range(16)]
        picture.text(20, y + 13, f"rank {rank}", 12)
        picture.cells(66, y, row, size=14)
        picture.cells(356, y, [color if i in touched else LINE for i in range(16)], 7, 1)
        for i, slot in enumerate(touched):
            picture.box(506 + 38 * i, y, 14, 14, color)
            picture.text(524 + 38 * i, y + 12, slot, 10)
    picture.text(20, 178, "a column is a row of the table; gray ones are zeros", 12)
    picture.text(506, 178, "rows, and which", 12)
    return picture


def zen():
    """Balanced Parallelism: to owners by a hash, sums back to all."""
    picture = Picture(640, 262, "Zen: entries go to owners by a hash, sums come back")
    owners = [(5 * i + 3) % 7 % 3 for i in range(15)]
    sums = set()
    for rank in range(3):
        x, touched = 20 + 206 * rank, some(rank + 11, 4, 15)
        sums |= set(touched)
        picture.text(x, 26, f"rank {rank} has", bold=True)
        picture.cells(
            x, 36, [RANKS[owners[i]] if i in touched else None for i in range(15)], 10, 2
        )
        for owner in range(3):
            if any(owners[i] == owner for i in touched):
                picture.arrow(x + 88, 50, 20 + 206 * owner + 88, 104, RANKS[owner])
    picture.text(620, 82, "push", 12, "end")
    for owner in range(3):
        x, mine = 20 + 206 * owner, [i for i in sorted(sums) if owners[i] == owner]
        picture.text(x, 126, f"rank {owner} owns and adds up", bold=True)
        picture.cells(x, 136, [RANKS[owner]] * len(mine), 14, 3)
        for rank in range(3):
            picture.arrow(x + 88, 156, 20 + 206 * rank + 88, 206, RANKS[owner], 1)
    picture.text(620, 186, "pull", 12, "end")
    for rank in range(3):
        x = 20 + 206 * rank
        row = [RANKS[owners[i]] if i in sums else None for i in range(15)]
        picture.cells(x, 212, row, 10, 2)
        picture.text(x, 242, "the same sum, bit for bit", 12)
    return picture


def embrace():
    """A table by columns: ids to all, vectors to who asked."""
    picture = Picture(640, 236, "EmbRace: each rank holds some columns of all rows")
    picture.text(20, 28, "the table: each rank has columns of it", bold=True)
    wanted = {1: 0, 3: 1, 4: 2}
    for row in range(6):
        for column in range(9):
            color = RANKS[column // 3]
            picture.box(
                20 + 22 * column, 44 + 24 * row, 19, 19, color if row in wanted else PALE
            )
    for rank in range(3):
        picture.text(50 + 66 * rank, 208, f"rank {rank}", 12, "middle", RANKS[rank], True)
    picture.text(250, 64, "1. ids to all ranks", 13)
    picture.text(250, 84, "(all-gather: a few numbers)", 12, color="#57606a")
    picture.arrow(250, 120, 380, 120)
    picture.text(250, 108, "2. vectors", 13)
    picture.text(250, 140, "(all-to-all)", 12, color="#57606a")
    picture.arrow(380, 170, 250, 170)
    picture.text(250, 190, "3. gradients, back", 13)
    picture.text(440, 28, "what each rank has read", bold=True)
    for row, rank in wanted.items():
        y = 66 + 50 * rank
        for column in range(9):
            picture.box(440 + 20 * column, y, 17, 17, RANKS[column // 3])
        picture.text(440, y - 6, f"rank {rank} asked for row {row}", 12)
    return picture


def dragonn():
    """A threshold, and a hash memory in which elements find a slot or not."""
    picture = Picture(640, 236, "DRAGONN: large elements are sent if they find a slot")
    heights = [12, 55, 8, 20, 70, 15, 48, 9, 62, 18, 5, 44, 11, 58, 16, 7]
    slots = {1: 0, 4: 3, 6: 3, 8: 5, 11: 1, 13: 6}
    picture.text(20, 26, "magnitudes of a gradient", bold=True)
    for i, height in enumerate(heights):
        x = 24 + 36 * i
        stays = i in slots and i != 6
        fill = RANKS[0] if stays else RANKS[1] if i == 6 else PALE
        picture.box(x, 116 - height, 20, height, fill)
        if i in slots:
            picture.arrow(x + 10, 120, 70 + 70 * slots[i] + 20, 166, LINE)
    picture.line(20, 76, 616, 76, dashes="4 4")
    picture.text(532, 54, "threshold,", 12)
    picture.text(532, 69, "from a sample", 12)
    for slot in range(8):
        filled = slot in {s for i, s in slots.items() if i != 6}
        picture.box(70 + 70 * slot, 168, 44, 22, RANKS[0] if filled else PALE, LINE)
    picture.text(20, 184, "slots", 12)
    picture.text(
        20,
        220,
        "One write each, no sort. Of two in one slot one is sent, the other waits.",
        13,
    )
    return picture


def ok_topk():
    """Regions whose bounds follow the data."""
    picture = Picture(640, 256, "Ok-Topk: each rank sums a region that has its share")
    bounds = (0, 5, 17, 24)
    region = lambda i: sum(i >= bound for bound in bounds[1:3])
    picture.text(20, 26, "each rank selects above a threshold that it reuses", bold=True)
    for rank in range(3):
        mine = {*some(rank + 5, 3, 5), *(5 + i for i in some(rank, 3, 12))}
        mine |= {17 + i for i in some(rank + 9, 3, 7)}
        y = 40 + 26 * rank
        picture.text(20, y + 13, f"rank {rank}", 12)
        picture.cells(
            70, y, [RANKS[region(i)] if i in mine else None for i in range(24)], 16, 4
        )
    for bound in bounds[1:3]:
        x = 70 + 20 * bound - 2
        picture.line(x, 36, x, 118, width=2)
    for rank, (a, b) in enumerate(itertools.pairwise(bounds)):
        middle = 70 + 10 * (a + b)
        picture.arrow(middle, 122, middle, 152, RANKS[rank], 2)
        words = f"rank {rank} sums"
        picture.text(middle, 170, words, 12, "middle", RANKS[rank], True)
    picture.text(
        20, 204, "Bounds are moved so that all regions have the same number of entries.", 13
    )
    picture.text(
        20, 228, "From its sums each rank selects again, and sends those to all.", 13
    )
    return picture


def spardl():
    """Reduce-scatter with a selection before each message."""
    picture = Picture(640, 262, "SparDL: select from each block before it is sent")
    picture.text(20, 26, "what rank 0 of four holds, by blocks", bold=True)
    stages = (
        ("at first", (5, 5, 5, 5)),
        ("after step 1", (6, 6, 0, 0)),
        ("after step 2", (8, 0, 0, 0)),
    )
    for stage, (words, counts) in enumerate(stages):
        y = 44 + 66 * stage
        picture.text(20, y + 15, words, 13)
        for block, count in enumerate(counts):
            x = 118 + 112 * block
            picture.box(x, y, 104, 24, "#f0f3f7", LINE)
            kept = min(count, 3)
            for i in range(kept):
                picture.box(x + 6 + 32 * i, y + 5, 14, 14, RANKS[block])
        if stage < 2:
            gone = (
                "two blocks go to rank 2, and two come"
                if not stage
                else "one goes to rank 1"
            )
            picture.text(118, y + 46, f"select k/4 of each block, send: {gone}", 12)
    picture.text(20, 228, "So sums never fill in, and every message has a known size.", 13)
    picture.text(
        20, 250, "Then all-gather. What was not selected stays where it was cut.", 13
    )
    return picture


def local_steps():
    """Rounds of steps without an exchange, from one anchor to the next."""
    picture = Picture(640, 212, "Local steps: each rank trains alone for a round")
    picture.text(
        20, 26, "parameters of three ranks, over two rounds of four steps", bold=True
    )
    for rank, color in enumerate(RANKS[:3]):
        y = 64 + 36 * rank
        picture.text(20, y + 5, f"rank {rank}", 12)
        for round_ in range(2):
            x = 96 + 240 * round_
            for step in range(4):
                picture.box(x + 12 + 46 * step, y - 9, 38, 18, color)
            picture.arrow(x + 196, y, x + 216, y, color, 2)
    for number in range(3):
        x = 82 + 240 * number
        picture.box(x, 48, 16, 100, INK)
        picture.text(x + 8, 166, "anchor", 12, "middle")
    picture.text(20, 196, "An arrow is an exchange: anchor - parameters of the rank.", 13)
    return picture


PICTURES = (gradient, zen, embrace, dragonn, ok_topk, spardl, local_steps)
