"""What CI names exists: pytest would say otherwise only when that step is reached."""

import ast
import re

import pytest

from tests.test_release import ROOT, needs_repository


pytestmark = needs_repository


def named(script):
    """Files of tests that a script names, each with a test or ""; variables expanded."""
    code = re.sub(r"^ *#.*", "", script, flags=re.MULTILINE)
    for name, value in re.findall(r"^(\w+)=(tests/\S+)$", code, re.MULTILINE):
        code = code.replace(f"{name}={value}\n", "").replace(f"${{{name}}}", value)
    found = re.findall(r"(tests/[\w./]+)(?:::([^\s\"]+))?", code)
    assert len(found) == code.count("tests/")
    assert not any("$" in test for _, test in found), found
    return found


def missing(script):
    """What a script names and the syntax tree of no file has."""
    gone = []
    for file, test in named(script):
        path = ROOT / file
        tests = [""]
        if path.is_file():
            tree = ast.parse(path.read_text())
            tests += [one.name for one in tree.body if isinstance(one, ast.FunctionDef)]
        if not path.exists() or test not in tests:
            gone.append(f"{file}::{test}" if test else file)
    return gone


def test_every_test_that_ci_names_exists():
    script = (ROOT / ".ci" / "run").read_text()
    assert sum(bool(test) for _, test in named(script)) >= 4
    assert not missing(script)


@pytest.mark.parametrize(
    ("line", "gone"),
    [
        ("tests/test_ci.py::missing tests/test_smoke.py tests/wire", []),
        ("tests/test_ci.py::renamed", ["tests/test_ci.py::renamed"]),
        ("tests/test_moved.py", ["tests/test_moved.py"]),
        (
            'of=tests/test_ci.py::test_every\npytest "${of}_test_that_ci_names_exists" \\\n'
            '  "${of}_law"',
            ["tests/test_ci.py::test_every_law"],
        ),
    ],
)
def test_what_is_gone_is_told(line, gone):
    assert missing(f"{line}\n") == gone
