"""A card to draw on, in SVG.

It is light and has its own background, so that it reads on dark pages, too. Colors are
those of ranks: what a rank owns or makes has its color everywhere.
"""

import random


RANKS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # color-blind eyes can tell them apart
INK, PALE, LINE, CARD = "#22272e", "#e4e8ee", "#9aa4b2", "#fbfcfe"


class Picture:
    """A drawing, in pixels from the upper left corner."""

    def __init__(self, width, height, title):
        self.size, self.title, self.parts = (width, height), title, []

    def box(self, x, y, width, height, fill=PALE, line="none", round_=2):
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
            f'rx="{round_}" fill="{fill}" stroke="{line}"/>'
        )

    def text(self, x, y, words, size=13, anchor="start", color=INK, bold=False):
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" '
            f'fill="{color}"{weight}>{words}</text>'
        )

    def arrow(self, x, y, to_x, to_y, color=LINE, width=1.5):
        self.parts.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{color}" '
            f'stroke-width="{width}" marker-end="url(#head)"/>'
        )

    def line(self, x, y, to_x, to_y, color=INK, width=1, dashes=""):
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        self.parts.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{color}" '
            f'stroke-width="{width}"{dashed}/>'
        )

    def cells(self, x, y, colors, size=16, gap=2):
        """A row of cells, an empty one where a color is None."""
        for i, color in enumerate(colors):
            self.box(x + i * (size + gap), y, size, size, color or PALE)

    def svg(self):
        width, height = self.size
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" font-family="system-ui, '
            f'Helvetica, Arial, sans-serif">\n<title>{self.title}</title>\n'
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto-start-reverse"><path d="M0 0 8 4 0 8z" '
            f'fill="{LINE}"/></marker></defs>\n'
            f'<rect width="{width}" height="{height}" rx="8" fill="{CARD}"/>\n'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )


def some(seed, count, of):
    return sorted(random.Random(seed).sample(range(of), count))
