"""What the library reads is data: no file and no message is ever run or unpickled.

Read with `ast`, so nothing is executed.
"""

import ast

import pytest

from tests.laws.test_layers import MODULES


# Modules whose formats run code when they are read.
RUNNING = {"_pickle", "cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
# Functions of Python's that run a text.
RUNS = {"__import__", "compile", "eval", "exec"}
# Functions that unpickle or run what they read, by the names that they are called by.
READS = {"read_pickle", "unsafe_load", "full_load"}


def runs_data(source):
    """What in a file would run, or unpickle, what was read, as it is written there."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                names = [node.module or "", *names]
            found += [name for name in names if name.split(".")[0] in RUNNING]
            found += [name for name in names if name in RUNS]
        elif isinstance(node, ast.Name) and node.id in RUNS | RUNNING:
            found.append(node.id)  # called, or handed on to be called
        elif isinstance(node, ast.Attribute):
            of_builtins = isinstance(node.value, ast.Name) and node.value.id == "builtins"
            if node.attr in READS | RUNNING or (of_builtins and node.attr in RUNS):
                found.append(ast.unparse(node))
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            if not isinstance(node.value, ast.Constant) or node.value.value is not False:
                found.append(f"allow_pickle={ast.unparse(node.value)}")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "yaml.load":
            found.append("yaml.load")
    return found


@pytest.mark.parametrize("module", MODULES)
def test_nothing_that_is_read_is_run(module):
    assert not runs_data(MODULES[module].read_text())


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "from six.moves import cPickle as pickle, pickle",
        "list(map(exec, texts))",
        "import builtins; builtins.eval(text)",
        "__import__(name)",
        "np.load(file, allow_pickle=trusted)",
        "pd.read_pickle(file)",
        "yaml.load(text)",
    ],
)
def test_what_runs_data_is_found(source):
    assert runs_data(source)
