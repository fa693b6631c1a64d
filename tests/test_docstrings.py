"""The docstrings of public names have one template.

One line says what it is. Then come text, with a formula where one defines it, and the
sections of `ORDER`, of which those that apply are there. `docs/public.py` says what is
public.
"""

import inspect
import re

import pytest

from docs import public


ORDER = [
    "Args",
    "Attributes",
    "Returns",
    "Yields",
    "Raises",
    "Example",
    "References",
    "See Also",
]
HEADING = re.compile(rf"^({'|'.join(ORDER)}):$", re.M)
LISTED = public.listed()
CLASSES = {
    name: value
    for name, value in LISTED.items()
    if inspect.isclass(value) and not issubclass(value, Exception)
}
MEMBERS = {
    f"{name}.{member}": value
    for name, kind in CLASSES.items()
    for member, value in public.members(kind).items()
}
# Functions return them; nobody calls the class.
RETURNED = {"sparsejax.rows.Lazy", "sparsejax.training.DataParallel"}
# Parameters that flax adds to its classes.
FLAX = {"graph", "name", "parent"}


def sections(doc: str) -> dict[str, str]:
    """The text before the first heading, as "", and that below each heading."""
    first, *rest = HEADING.split(doc)
    return {"": first} | dict(zip(rest[::2], rest[1::2], strict=True))


def entries(text: str) -> list[str]:
    """The names that a section defines."""
    return re.findall(r"^    (\*{0,2}\w+): \S", text, re.M)


def parameters(value) -> list[str]:
    """The parameters of a call, as a docstring writes them."""
    if inspect.isclass(value) and value.__init__ is not object.__init__:
        value = value.__init__
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return [
        stars.get(parameter.kind, "") + name
        for name, parameter in inspect.signature(value).parameters.items()
        if name not in ("self", "cls")
    ]


def faults(name, value):
    """What of the template a docstring lacks."""
    doc = inspect.getdoc(value) or ""
    found = sections(doc)
    yield from faults_of_every(found)
    if ">>> " not in found.get("Example", ""):
        yield "it has an Example:"
    if re.search(r"\b(paper|authors)\b", doc) and "References" not in found:
        yield "it names the paper below References:"
    if returns := found.get("Returns", "").strip():
        first = re.sub("`[^`]*`", "", returns.partition("\n")[0])
        if ": " in first or first.endswith(":"):
            yield "Sphinx takes what precedes a colon in Returns: for a type"
    if inspect.isroutine(value):
        yield from faults_of_function(value, found)
    elif name in CLASSES and name not in RETURNED:
        is_of_flax = name.startswith(("sparsejax.embrace.linen", "sparsejax.embrace.nnx"))
        wanted = [p for p in parameters(value) if not (is_of_flax and p in FLAX)]
        given = entries(found.get("Args", found.get("Attributes", "")))
        if given != wanted:
            yield f"Attributes: or Args: name {wanted}, and not {given}"


def faults_of_every(found):
    """What a docstring of anything lacks."""
    summary = found[""].partition("\n\n")[0].strip()
    if not re.fullmatch(r".*\w.*\.", summary):
        yield f"the summary is one line that ends in a period: {summary!r}"
    if [*found][1:] != [heading for heading in ORDER if heading in found]:
        yield f"sections have the order {ORDER}"


def faults_of_function(value, found):
    """What the sections of a function lack."""
    given, wanted = entries(found.get("Args", "")), parameters(value)
    if given != wanted:
        yield f"Args: names {wanted}, and not {given}"
    returned = inspect.signature(value).return_annotation
    if returned not in (None, inspect.Parameter.empty):
        if not {"Returns", "Yields"} & {*found}:
            yield f"it has Returns: for {returned}"


@pytest.mark.parametrize("name", sorted(LISTED))
def test_a_docstring_has_the_template(name):
    assert not [*faults(name, LISTED[name])]


@pytest.mark.parametrize("name", sorted(MEMBERS))
def test_a_method_is_documented(name):
    value = MEMBERS[name]
    found = sections(inspect.getdoc(value) or "")
    assert not [*faults_of_every(found)]
    if inspect.isroutine(function := getattr(value, "__func__", value)):
        wanted, given = parameters(function), entries(found.get("Args", ""))
        assert given == wanted if given else len(wanted) < 3, f"Args: names {wanted}"
