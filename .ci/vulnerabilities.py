"""Says what a report of pip-audit found: `python vulnerabilities.py LIST REPORT.json`.

Ends with 1 where there is a vulnerability, and with 2 where packages were not looked up.
pip-audit itself says that it has found none where it was told of no package at all.
"""

import json
import pathlib
import sys


def main(name: str, report: str) -> int:
    """Prints a line for each vulnerability, and one for those that were not looked up."""
    packages = json.loads(pathlib.Path(report).read_text())["dependencies"]
    skipped = [package["name"] for package in packages if "skip_reason" in package]
    found = [(package, one) for package in packages for one in package.get("vulns", [])]
    for package, one in found:
        fixed = ", ".join(one["fix_versions"]) or "no version yet"
        what = f"{package['name']} {package['version']}"
        print(f"VULNERABLE: {what}: {one['id']}, fixed in {fixed}.")
    looked_up = len(packages) - len(skipped)
    print(f"{name}: looked up {looked_up} of {len(packages)}, found {len(found)}.")
    if skipped:
        names = ", ".join(skipped[:3]) + ", ..." * (len(skipped) > 3)
        print(
            f"NOT AUDITED: {names}: the list of vulnerabilities does not answer here. This "
            "says nothing about them."
        )
    return 1 if found else 2 if skipped else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
