"""How the documentation is built: `make docs`, where a warning is an error."""

import pathlib
import re
import sys


# The library that is documented.
sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import sparsejax


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
nb_execution_timeout = 180  # seconds for a cell
nb_merge_streams = True
nb_output_stderr = "remove"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# Docstrings write code in single backticks, and are Google style.
default_role = "literal"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
autodoc_typehints = "none"
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = "sparsejax"
html_static_path = []
html_show_sphinx = False


def _separate(app, what, name, obj, options, lines):
    """Sets apart code in backticks and the letters behind it, as in `Plan`s."""
    text = re.sub(
        r"`([^`]+)`(\w?)",
        lambda found: f"`{found[1]}`" + (rf"\ {found[2]}" if found[2] else ""),
        "\n".join(lines),
    )
    lines[:] = text.split("\n")


def setup(app):
    """Connects what repairs docstrings."""
    app.connect("autodoc-process-docstring", _separate, priority=400)
