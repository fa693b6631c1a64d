"""What `make audit` says of packages, by a service on this host that answers as OSV does.

pip-audit itself is installed and run: it takes another service by two variables. Only
where it cannot be installed, its reports of `RECORDED` have to do.
"""

import contextlib
import http.server
import json
import os
import re
import runpy
import subprocess
import sys
import threading

import pytest

from tests.test_release import LISTS, ROOT, needs_repository, pinned


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


@contextlib.contextmanager
def service(status, advisories):
    """A service that knows these advisories, by package; its URL, and what was asked."""
    asked = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            length = int(self.headers["Content-Length"])
            query = json.loads(self.rfile.read(length))
            name = query["package"]["name"]
            asked[name] = query["version"]
            known = advisories.get(name, [])
            body = json.dumps({"vulns": known} if known else {}).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/query", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def advisory(package):
    """One of OSV's, of a version of a package and all before."""
    events = [{"introduced": "0"}, {"fixed": "9999.1"}]
    affected = {
        "package": {"name": package, "ecosystem": "PyPI"},
        "ranges": [{"type": "ECOSYSTEM", "events": events}],
    }
    return {
        "schema_version": "1.7.0",
        "id": "PYSEC-2030-7",
        "summary": "A made-up one.",
        "modified": "2030-01-02T03:04:05Z",
        "affected": [affected],
    }


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Where the first audit installs pip-audit, and the others find it."""
    return tmp_path_factory.mktemp("audit") / "environment"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "advisories", "status"),
    [(200, {"numpy": [advisory("numpy")]}, 1), (500, {}, 2)],
    ids=["an advisory", "out of order"],
)
def test_what_an_audit_says(answer, advisories, status, environment):
    with service(answer, advisories) as (url, asked):
        # A proxy would be asked for this host, too.
        own = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
        own |= {"PIP_AUDIT_VULNERABILITY_SERVICE": "osv", "PIP_AUDIT_OSV_URL": url}
        done = subprocess.run(
            ["bash", str(ROOT / ".ci" / "audit")],
            env=own | {"PYTHON": sys.executable, "AUDIT_ENVIRONMENT": str(environment)},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    if "pip-audit cannot be installed" in done.stdout:
        assert done.returncode == 2
        pytest.skip("pip-audit cannot be installed here: its service is not reached")
    assert done.returncode == status, done.stdout + done.stderr
    wanted = {name: version for path in LISTS for name, version in pinned(path).items()}
    if answer == 200:
        assert asked == wanted
        for path in LISTS:
            n = len(pinned(path))
            found = int(bool(advisories.keys() & pinned(path).keys()))
            line = f"{re.escape(path.name)}: looked up {n} of {n}, found {found}\\."
            assert re.search(line, done.stdout), done.stdout
    else:
        assert len(re.findall("^NOT AUDITED: ", done.stdout, re.M)) == len(LISTS)
    # What a clean one says is in `test_what_a_report_says`.
    told = f"VULNERABLE: numpy {wanted['numpy']}: PYSEC-2030-7, fixed in 9999.1."
    assert (told in done.stdout) == (status == 1)


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
