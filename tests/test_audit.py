"""What `make audit` says of packages, by reports of pip-audit."""

import json
import os
import runpy
import subprocess
import sys

import pytest

from tests.test_release import ROOT, needs_repository


pytestmark = needs_repository

# What pip-audit 2.10.1 wrote of such answers, and where it was told of a package it knows
# nothing of.
FOUND = {
    "id": "PYSEC-2030-7",
    "fix_versions": ["2.1", "3.0"],
    "aliases": ["CVE-2030-7"],
    "description": "A made-up one.",
}
CLEAN = {"name": "one", "version": "1.0", "vulns": []}
RECORDED = {
    "clean": ([CLEAN], 0, ["list: looked up 1 of 1, found 0."]),
    "found": (
        [CLEAN, {"name": "two", "version": "2.0", "vulns": [FOUND]}],
        1,
        [
            "VULNERABLE: two 2.0: PYSEC-2030-7, fixed in 2.1, 3.0.",
            "list: looked up 2 of 2, found 1.",
        ],
    ),
    "not fixed": (
        [{"name": "two", "version": "2.0", "vulns": [FOUND | {"fix_versions": []}]}],
        1,
        ["PYSEC-2030-7, fixed in no version yet."],
    ),
    "skipped": (
        [CLEAN, {"name": "three", "skip_reason": "not found on PyPI: three (3.0)"}],
        2,
        ["list: looked up 1 of 2, found 0.", "NOT AUDITED: three: the list of"],
    ),
}


@pytest.mark.parametrize("name", RECORDED)
def test_what_a_report_says(name, tmp_path, capsys):
    dependencies, status, lines = RECORDED[name]
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"dependencies": dependencies, "fixes": []}))
    judge = runpy.run_path(str(ROOT / ".ci" / "vulnerabilities.py"))["main"]
    assert judge("list", str(report)) == status
    said = capsys.readouterr().out
    for line in lines:
        assert line in said


@pytest.mark.slow
def test_an_audit_that_cannot_begin_says_nothing_about_packages(tmp_path):
    """In an environment that is there already, as making one takes long."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    own = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    own |= {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    # What is installed there has to come anew.
    own |= {"AUDIT_ENVIRONMENT": str(tmp_path), "PIP_IGNORE_INSTALLED": "1"}
    line = ["bash", str(ROOT / ".ci" / "audit")]
    done = subprocess.run(
        line, env=own, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout.startswith("NOT AUDITED: pip-audit cannot be installed here.")
