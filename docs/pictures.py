"""Draws the pictures of the documentation as SVG: `python docs/pictures.py` writes them."""

import pathlib

from drawn import concepts, systems


FOLDER = pathlib.Path(__file__).parent / "pictures"
PICTURES = (*systems.PICTURES, *concepts.PICTURES)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for draw in PICTURES:
        (FOLDER / f"{draw.__name__}.svg").write_text(draw().svg())
