"""Prints what pip-audit has found: `python vulnerabilities.py REPORT.json`."""

import json
import pathlib
import sys


for package in json.loads(pathlib.Path(sys.argv[1]).read_text())["dependencies"]:
    for found in package.get("vulns", []):
        fixed = ", ".join(found["fix_versions"]) or "no version yet"
        name = f"{package['name']} {package['version']}"
        print(f"  {name}: {found['id']}, fixed in {fixed}")
