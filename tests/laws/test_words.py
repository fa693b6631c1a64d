"""One noun for each concept: docs/glossary.md lists them, and names are not used twice."""

import ast
import collections
import re

import pytest

from tests.laws.test_layers import MODULES, ROOT


GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
ROWS = re.findall(r"^\| ([^|]+) \| [^|]+ \| ([^|]+) \|$", GLOSSARY, re.M)[2:]
# Names of files that say nothing of what is in them.
RIDDLES = {
    "anatomy",
    "beside",
    "forms",
    "inside",
    "misc",
    "multiples",
    "side",
    "sleeping",
    "told",
    "utils",
    "view",
    "whole",
}


def defined():
    """The names of classes, functions and methods, with the modules that define them."""
    found = collections.defaultdict(set)
    classes = collections.defaultdict(set)
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                classes[node.name.strip("_")].add(module)
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AnnAssign):
                target = getattr(node, "target", None)
                found[getattr(target, "id", getattr(node, "name", ""))].add(module)
    return found, classes


FOUND, CLASSES = defined()


def test_no_two_classes_have_one_name():
    twice = {name for name, modules in CLASSES.items() if len(modules) > 1}
    assert not twice


@pytest.mark.parametrize(("term", "names"), ROWS)
def test_a_term_of_the_glossary_is_in_the_code(term, names):
    listed = re.findall(r"`([\w.]+)`", names)
    assert listed, term
    for name in listed:
        *_, last = name.split(".")
        assert FOUND[last], f"{term}: nothing is named {name}"


def test_terms_are_listed_once():
    terms = [term for term, _ in ROWS]
    assert len(terms) == len(set(terms)) > 30


def test_no_file_has_a_name_that_says_nothing():
    assert not {path.stem for path in MODULES.values()} & RIDDLES
