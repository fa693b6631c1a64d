"""How the documentation is built: `make docs`, where a warning is an error.

It warns of what is public and in no page of `api`: see `public` and `_check`.
"""

import inspect
import pathlib
import re
import sys

from sphinx.util import logging
from sphinx.util.inspect import stringify_signature


# The library that is documented.
sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import sparsejax
from docs import public


project = "sparsejax"
author = "the authors of sparsejax"
version = release = sparsejax.__version__

extensions = [
    "myst_nb",  # Pages, and the tutorials, which it runs.
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]

# A tutorial that fails fails the build. What has run is kept until its page changes.
nb_execution_mode = "cache"
nb_execution_raise_on_error = True
nb_execution_timeout = 600  # seconds for a cell, beside other work of CI
nb_merge_streams = True
nb_output_stderr = "remove"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# Docstrings write code in single backticks, and are Google style.
default_role = "literal"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_attr_annotations = False
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "special-members": "__call__"}
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = "sparsejax"
html_static_path = ["style"]
html_css_files = ["pages.css"]
html_show_copyright = False  # The licence is in the repository.
html_show_sphinx = False
pygments_style = "default"  # The theme's own has no color for a line that a diff adds.


LISTED = public.listed()
SHORT = {name.rpartition(".")[2]: name for name in LISTED}
# By the module and the name of a class, the members that stand below it.
MEMBERS = {
    (kind.__module__, kind.__qualname__): {*public.members(kind)}
    for kind in LISTED.values()
    if isinstance(kind, type)
}
# What stands in signatures for a name, or for a value that has no name.
_OF = r"[~\w.]*"
SHORTER = {
    rf"str \| type\[{_OF}Any\] \| {_OF}dtype \| {_OF}SupportsDType": "DTypeLike",
    rf"{_OF}Array \| {_OF}ndarray \| {_OF}bool \| {_OF}number \| bool \| int \| float"
    r" \| complex": "ArrayLike",
    r"<class '[\w.]*?(\w+)'>": r"\1",
    r"<(?:function|object|[\w.]+ object)[^>]*(?:>\.\w+)*>": "...",
    r", parent: .*, name: [^)]*": "",  # what flax adds to a module
    r"<factory>": "...",
}


def _formulas(app, what, name, obj, options, lines):
    """Makes an indented block in the text of a docstring a block of code."""
    for i in reversed(range(2, len(lines))):
        before, gap, line = lines[i - 2 : i + 1]
        if re.match(r"[^\s*.]", before) and not gap and line.startswith("    "):
            lines[i:i] = [".. code-block:: text", ""]


def _links(app, what, name, obj, options, lines):
    """Makes code in backticks a link, where it is a name of these pages.

    It also sets apart the letters behind it, as in `Plan`s.
    """

    def link(found):
        code, letters = found.groups()
        known = [path for path in (code, f"sparsejax.{code}") if path in LISTED]
        known += [SHORT[code]] if code[:1].isupper() and code in SHORT else []
        # A single word may be a method of another class, as `init` is.
        is_link = known and name != known[0] and not re.fullmatch("[a-z]+", code)
        text = f":py:obj:`{code} <{known[0]}>`" if is_link else f"`{code}`"
        return text + (rf"\ {letters}" if letters else "")

    text = "\n".join(lines)
    lines[:] = re.sub(r"(?<![`:])`([^`]+)`(\w?)", link, text).split("\n")


def _skip(app, what, name, obj, skip, options):
    """Leaves out fields, which the text of a class has, and what a listed base has."""
    function = getattr(obj, "fget", None) or getattr(obj, "func", None) or obj
    function = inspect.unwrap(getattr(function, "__func__", function))
    owner = getattr(function, "__qualname__", "").rpartition(".")[0]
    return name not in MEMBERS.get((getattr(function, "__module__", None), owner), ())


def _signed(app, what, name, obj, options, signature, returned):
    """Writes types by their short names; that of flax's classes is of `__init__`."""
    if signature and signature.startswith("(*args") and isinstance(obj, type):
        own = inspect.signature(obj.__init__)
        own = own.replace(parameters=[*own.parameters.values()][1:])
        signature = stringify_signature(own, unqualified_typehints=True)
    texts = [signature, returned]
    for pattern, short in SHORTER.items():
        texts = [text and re.sub(pattern, short, text) for text in texts]
    return tuple(texts)


def _check(app, env):
    """Warns of what is public and on no page."""
    wanted = {*public.names(), *LISTED}
    for name, kind in LISTED.items():
        if isinstance(kind, type) and not issubclass(kind, Exception):
            wanted |= {f"{name}.{member}" for member in public.members(kind)}
    for name in sorted(wanted - {*env.domains.python_domain.objects}):
        logging.getLogger(__name__).warning("%s is public, and on no page of api", name)


def setup(app):
    """Connects what the reference is made with."""
    app.connect("autodoc-process-docstring", _formulas, priority=300)
    app.connect("autodoc-process-docstring", _links, priority=400)
    app.connect("autodoc-process-signature", _signed)
    app.connect("autodoc-skip-member", _skip)
    app.connect("env-check-consistency", _check)
