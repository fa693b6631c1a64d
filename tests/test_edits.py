"""Edits anchored by the syntax tree."""

import textwrap

import pytest

from tests import edits
from tests.edits import Edit


def applied(tmp_path, source, *edit, file="sparsejax/one.py"):
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source))
    found, edited = edits.apply(Edit(*edit), tmp_path)
    assert found == path
    return edited


CLASS = """
class Sum:
    def of(self, x, y):
        total = x + y  # the sum
        return total
"""
EDIT = ("Sum.of", "total = x + y", "total = x - y")


@pytest.mark.parametrize(
    ("was", "is_now"),
    [
        ("", ""),
        ("total", "result"),
        ("x + y", "(x\n            + y)"),
        ("self, x, y", "self, y, x"),
        ("        total =", "        if x:\n            total ="),
    ],
    ids=["as written", "renamed", "formatted", "reordered", "moved into a block"],
)
def test_an_edit_survives_what_changes_no_meaning(tmp_path, was, is_now):
    source = CLASS.replace(was, is_now) if was else CLASS
    edited = applied(tmp_path, source, *EDIT)
    if was == "total":
        assert edited == source.replace("x + y", "x - y")
    else:
        assert "total = x - y" in edited


def test_local_variables_may_be_swapped_but_not_confused(tmp_path):
    source = CLASS.replace("x", "a").replace("y", "b").replace("+ b  #", "+ b + a  #")
    edited = applied(tmp_path, source, "Sum.of", "x + y + x", "y")
    assert "total = (b)" in edited
    with pytest.raises(LookupError, match=r"is in 0 places of Sum\.of"):
        applied(tmp_path, source, "Sum.of", "x + y + y", "y")


def test_what_is_in_two_places_is_said(tmp_path):
    source = "def f(x):\n    return g(x) + g(x)\n"
    with pytest.raises(LookupError, match=r"is in 2 places of f .*sparsejax/one.py"):
        applied(tmp_path, source, "f", "g(x)", "x")
    with pytest.raises(LookupError, match="Has the definition a new name"):
        applied(tmp_path, source, "h", "g(x)", "x")
    with pytest.raises(LookupError, match="is in 0 places"):
        applied(tmp_path, source, "f", "h(x)", "x")


def test_a_body_of_dots_is_any_body(tmp_path):
    source = "def f(x):\n    for a in x:\n        if a:\n            g(a)\n"
    edited = applied(tmp_path, source, "f", "for b in x: ...", "for b in x[1:]: ...")
    assert edited == source.replace("in x", "in x[1:]")
    edited = applied(tmp_path, source, "f", "if a: ...", "pass")
    assert edited == "def f(x):\n    for a in x:\n        pass\n"


def test_variables_decorators_and_calls_outside_functions(tmp_path):
    source = "N = 4\n@g(N)\ndef f():\n    return N\nf.call(N)\n"
    assert applied(tmp_path, source, "N", "4", "5").startswith("N = (5)\n")
    edited = applied(tmp_path, source, "f", "@g(N)\ndef f(): ...", "def f(): ...")
    assert edited == "N = 4\ndef f():\n    return N\nf.call(N)\n"
    assert applied(tmp_path, source, "f.call", "N", "0").endswith("f.call((0))\n")


def test_a_module_tells_definitions_of_one_name_apart(tmp_path):
    applied(tmp_path, "def f(x):\n    return x + 1\n", "f", "x + 1", "x")
    edits._files.cache_clear()
    edits.find.cache_clear()
    with pytest.raises(LookupError, match="in 2 places"):
        applied(
            tmp_path,
            "def f(x):\n    return x + 1\n",
            "f",
            "x + 1",
            "x",
            file="benchmarks/b.py",
        )
    applied(tmp_path, "def f(y):\n    return y + 1\n", "one.f", "x + 1", "x")
