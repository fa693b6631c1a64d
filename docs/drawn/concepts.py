"""The pictures of the concepts."""

from drawn.card import CARD, INK, LINE, PALE, RANKS, Picture, some


def local_gradients():
    """Where a gradient is local, and where it is summed."""
    picture = Picture(640, 206, "A gradient is local until the ranks sum it")
    for x, words in ((20, "batch"), (150, "local gradient"), (496, "sum")):
        picture.text(x, 26, words, bold=True)
    touched = [some(rank + 3, 3, 14) for rank in range(3)]
    owner = {i: RANKS[rank] for rank, slots in enumerate(touched) for i in slots}
    for rank, color in enumerate(RANKS[:3]):
        y = 42 + 34 * rank
        picture.box(20, y, 84, 22, color)
        picture.text(62, y + 15, f"of rank {rank}", 12, "middle", CARD)
        picture.arrow(108, y + 11, 144, y + 11)
        row = [color if i in touched[rank] else None for i in range(14)]
        picture.cells(150, y + 5, row, 11, 2)
        picture.arrow(338, y + 11, 368, y + 11)
        picture.arrow(456, y + 11, 490, y + 11)
        picture.cells(496, y + 7, [owner.get(i) for i in range(14)], 7, 2)
    picture.box(374, 38, 80, 98, PALE, LINE, 4)
    picture.text(414, 82, "sparsejax", 12, "middle", bold=True)
    picture.text(414, 98, "sums", 12, "middle")
    picture.line(332, 38, 332, 152, RANKS[1], 1.5, "4 4")
    picture.text(332, 168, "jax.grad alone sums here, densely:", 12, "middle", RANKS[1])
    picture.text(332, 186, "sparsejax.local prevents it", 12, "middle", RANKS[1])
    return picture


def sparsifiers():
    """Two steps of one rank: what is selected, and the residual that is added."""
    picture = Picture(640, 216, "What a step does not send is added to the next gradient")
    first, second = (44, 14, 60, 24, 8, 30, 52, 12), (16, 50, 10, 44, 14, 38, 18, 6)
    residual = [0 if height >= 44 else height for height in first]
    accumulated = [a + b for a, b in zip(residual, second, strict=True)]
    for x, words, heights in ((20, "step 1", first), (346, "step 2", accumulated)):
        picture.text(x, 26, words, bold=True)
        for i, height in enumerate(heights):
            left = x + 4 + 32 * i
            fill = RANKS[0] if height >= 44 else LINE
            picture.box(left, 142 - height, 22, height, fill)
            if x > 20 and residual[i]:  # On top of it is the new gradient.
                picture.line(left, 142 - residual[i], left + 22, 142 - residual[i], CARD, 2)
        picture.line(x, 98, x + 260, 98, dashes="4 4")
    picture.arrow(286, 130, 338, 130, LINE, 2)
    picture.text(312, 120, "residual", 12, "middle")
    picture.box(24, 162, 14, 14, RANKS[0])
    picture.text(46, 174, "sent: from the threshold on", 12)
    picture.box(24, 184, 14, 14, LINE)
    picture.text(46, 196, "kept on this rank as its residual", 12)
    picture.text(346, 174, "lower part: residual of step 1", 12)
    picture.text(346, 196, "upper part: gradient of step 2", 12)
    return picture


def rows():
    """The gradient of a table: an array of its size, or the rows that were read."""
    picture = Picture(640, 236, "A gradient by rows lists the rows that a batch has read")
    read = (1, 4, 6)
    picture.text(20, 26, "table", bold=True)
    picture.text(20, 218, "the batch reads rows 4, 1, 4, 6", 12)
    picture.text(250, 26, "dense gradient", bold=True)
    picture.text(250, 218, "all rows are made, sent, updated", 12)
    picture.text(480, 26, "by rows", bold=True)
    picture.text(480, 218, "only these are", 12)
    for row in range(8):
        y = 40 + 20 * row
        picture.cells(20, y, [INK if row in read else LINE] * 6, 16, 2)
        picture.cells(250, y, [RANKS[0] if row in read else None] * 6, 16, 2)
        picture.text(138, y + 13, row, 11)
        picture.text(368, y + 13, row, 11)
    for place, row in enumerate(read):
        y = 80 + 20 * place
        picture.cells(480, y, [RANKS[0]] * 6, 16, 2)
        picture.text(598, y + 13, row, 11)
    return picture


def state_by_rank():
    """What of a state is replicated, and what has a rank axis."""
    picture = Picture(
        640, 212, "Residuals differ by rank: an array, sharded over the ranks"
    )
    picture.text(540, 26, "in the state", bold=True)
    for rank, color in enumerate(RANKS):
        x = 120 + 102 * rank
        picture.text(x + 45, 26, f"rank {rank}", 13, "middle", color, True)
        picture.cells(x, 44, [LINE] * 5, 16, 2)
        picture.cells(x, 82, [LINE] * 5, 16, 2)
        picture.cells(x, 120, [color] * 5, 16, 2)
    for y, name, spec in (
        (44, "parameters", "P()"),
        (82, "moments", "P()"),
        (120, "residual", 'P("data")'),
    ):
        picture.text(20, y + 13, name, 13)
        picture.text(540, y + 13, spec, 13)
    picture.box(114, 114, 410, 28, "none", INK, 4)
    picture.text(319, 164, "one array: [4, *parameter]", 12, "middle")
    picture.text(20, 194, "Gray: the same on all ranks. In color: this rank's own.", 13)
    return picture


def checkpoints():
    """From four ranks to two: copies stay, residuals are distributed."""
    picture = Picture(640, 232, "A checkpoint of four ranks is restored on two")
    picture.text(20, 26, "four ranks", bold=True)
    picture.text(282, 26, "checkpoint", bold=True)
    picture.text(470, 26, "two ranks", bold=True)
    for rank, color in enumerate(RANKS):
        y = 42 + 36 * rank
        picture.box(20, y, 72, 24, LINE)
        picture.text(56, y + 16, "parameters", 11, "middle")
        picture.box(98, y, 72, 24, color)
        picture.text(134, y + 16, "residual", 11, "middle", CARD)
        picture.arrow(178, y + 12, 272, 92 + 10 * rank)
        picture.box(288, 90 + 22 * rank, 84, 16, color)
    picture.box(280, 52, 100, 134, "none", INK, 4)
    picture.box(288, 62, 84, 16, LINE)
    for rank, y in enumerate((70, 128)):
        picture.arrow(384, 104 + 22 * rank, 462, y + 12)
        picture.box(470, y, 72, 24, LINE)
        picture.text(506, y + 16, "parameters", 11, "middle")
        picture.box(548, y, 36, 24, RANKS[2 * rank])
        picture.box(584, y, 36, 24, RANKS[2 * rank + 1])
    picture.text(20, 214, "Parameters are copied. All of every residual is kept.", 13)
    return picture


def determinism():
    """An owner adds in the order of ranks, or in any order; all ranks get its sum."""
    picture = Picture(640, 190, "Ordered sums have the same bits in every run")
    for x, words in ((20, "an owner adds"), (190, "run 1"), (330, "run 2")):
        picture.text(x, 26, words, bold=True)
    sides = (
        ("in order of ranks", (0, 1, 2), "the same bits in both runs"),
        ("in any order", (2, 0, 1), "the last bit may differ"),
    )
    for side, (words, second, result) in enumerate(sides):
        y = 44 + 46 * side
        picture.text(20, y + 18, words, 13)
        for x, order in ((190, (0, 1, 2)), (330, second)):
            for place, rank in enumerate(order):
                left = x + 38 * place
                picture.box(left, y + 2, 22, 22, RANKS[rank])
                picture.text(left + 11, y + 17, rank, 12, "middle", CARD)
                if place:
                    picture.text(left - 8, y + 18, "+", 14, "middle")
        picture.text(470, y + 18, result, 12)
    picture.text(20, 156, "Either way one owner makes the sum, and the others copy it:", 13)
    picture.text(20, 176, "within a run all replicas have the same bits.", 13)
    return picture


def metrics():
    """The metrics of one exchange, as lengths."""
    picture = Picture(640, 262, "Bytes and densities of one exchange")
    dense, wire, payload = 460, 170, 130
    for row, (name, width, color) in enumerate(
        (("dense_bytes", dense, LINE), ("wire_bytes", wire, PALE))
    ):
        y = 22 + 34 * row
        picture.text(20, y + 15, name, 13)
        picture.box(150, y, width, 20, color, LINE)
    picture.box(150, 56, payload, 20, RANKS[0])
    picture.text(150 + payload / 2, 70, "payload_bytes", 12, "middle", CARD)
    picture.text(330, 70, "the rest is padding", 12)
    touched = [some(rank + 3, 3, 24) for rank in range(3)]
    owner = {i: RANKS[rank] for rank, slots in enumerate(touched) for i in slots}
    for y, name, colors, words in (
        (98, "density_before", dict.fromkeys(touched[0], RANKS[0]), "fullest rank"),
        (132, "density_after", owner, "the sum"),
    ):
        picture.text(20, y + 13, name, 13)
        picture.cells(150, y, [colors.get(i) for i in range(24)], 14, 2)
        picture.text(548, y + 12, words, 12)
    picture.text(20, 195, "push_imbalance", 13)
    for part, count in enumerate((5, 4, 4, 3)):
        x = 150 + 104 * part
        picture.box(x, 180, 84, 22, PALE, LINE)
        picture.cells(x + 6, 185, [RANKS[part]] * count, 12, 3)
    picture.text(568, 195, "5 / 4", 13)
    picture.text(150, 222, "parts of owners: the fullest has 5 entries, the mean is 4", 12)
    picture.text(150, 244, "every part of a message is as long as the fullest", 12)
    return picture


PICTURES = (
    *(local_gradients, sparsifiers, rows, state_by_rank),
    *(checkpoints, determinism, metrics),
)
