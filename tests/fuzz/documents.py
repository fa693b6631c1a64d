"""JSON documents that are valid but for a few places, for what reads files.

Drawn are places and what is done there: something else is put in, it is left out, wrapped
in a list, joined by a key that nobody knows, or replaced by a copy of another place. Then
the text may have bytes that are no text, an end that is missing, or a bit that has turned.
"""

import copy
import json
import math

from hypothesis import strategies as st


# Stands for lists in lists, so many that some or all of JSON's readers give up.
DEEP = {f"deep {depth}": "[" * depth + "]" * depth for depth in (500, 3_000, 100_000)}

# What a field is hardly ever made for.
ODD = [
    *(None, True, False, -1, 0, 1, 3, 65, 2**24 + 1, 2**31, 2**62 + 1, 2**63, 10**400),
    *(0.5, -0.0, 1e308, 1e-320, math.inf, -math.inf, math.nan),
    *("", "x", "row", "Zen", "dense", "TwoLevel", "float32", "f4,f4", ">f4", "O", "M8[s]"),
    *("(2,2)f4", "float32" * 99, "\ud800", "\0", "../..", "__class__", "1", "key<fry>"),
    *([], {}, [[]], [0], [1] * 70, [2**62, 2**62], [None], {"name": "Zen"}, {"": 0}),
    *({"value": 1}, {"array": 0}, {"shape": [1], "dtype": "int8", "array": 7}, *DEEP),
]
ODD_KEYS = ["", "name", "value", "shape", "array", "told", "type", "ratio", "\ud800"]
odd = st.one_of(
    st.sampled_from(ODD),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.just({"a": []}),
).map(copy.deepcopy)


def places(document, at=()):
    """The paths of all parts of a document, the whole first."""
    yield at
    inside = document.items() if isinstance(document, dict) else ()
    if isinstance(document, list):
        inside = enumerate(document)
    for key, value in inside:
        yield from places(value, (*at, key))


def part(document, at):
    for key in at:
        document = document[key]
    return document


@st.composite
def changed(draw, document, most=3):
    """A document, changed in up to so many places."""
    whole = [copy.deepcopy(document)]
    for _ in range(draw(st.integers(1, most))):
        at = 0, *draw(st.sampled_from(list(places(whole[0]))))
        holder, last, value = part(whole, at[:-1]), at[-1], part(whole, at)
        what = draw(st.sampled_from(["put", "remove", "add", "nest", "copy"]))
        if what == "add" and isinstance(value, dict):
            value[draw(st.sampled_from(ODD_KEYS))] = draw(odd)
        elif what == "add" and isinstance(value, list):
            value.append(draw(odd))
        elif what == "remove" and holder is not whole:
            del holder[last]
        elif what == "nest":
            holder[last] = [value]
        elif what == "copy":
            other = draw(st.sampled_from(list(places(whole[0]))))
            holder[last] = copy.deepcopy(part(whole[0], other))
        else:
            holder[last] = draw(odd)
    return whole[0]


def written(document):
    """A document as text."""
    text = json.dumps(document)
    for name, deep in DEEP.items():
        text = text.replace(f'"{name}"', deep)
    return text.encode()


@st.composite
def damaged(draw, text):
    """A text, perhaps with other bytes in it."""
    what = draw(st.sampled_from(["none", "none", "none", "cut", "bytes", "bit"]))
    at = draw(st.integers(0, max(0, len(text) - 1)))
    if what == "cut":
        return text[:at]
    if what == "bytes":
        return text[:at] + draw(st.binary(max_size=4)) + text[at:]
    if what == "bit" and text:
        turned = text[at] ^ 1 << draw(st.integers(0, 7))
        return text[:at] + bytes([turned]) + text[at + 1 :]
    return text


def files_like(document):
    """Texts of files that are nearly one that holds this document."""
    return changed(document).map(written).flatmap(damaged)
