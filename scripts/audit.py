"""Checks the packages pinned in constraints.txt for known vulnerabilities, with pip-audit and the OSV database.

    python scripts/audit.py

In: constraints.txt; arguments go to pip-audit (`--ignore-vuln ID`, `--osv-url URL`). Out: the vulnerabilities found.
Exit status: 0 if all packages were looked up and none is known to be vulnerable, 1 if one is, 2 if not all could be
looked up: an unreachable database must not pass.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints.txt"


def main() -> int:
    """Runs pip-audit and prints what it found."""
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(CONSTRAINTS), "--no-deps", "--disable-pip"]
    command += ["--vulnerability-service", "osv", "--progress-spinner", "off", "--format", "json"]
    with TemporaryDirectory() as directory:
        file = Path(directory) / "audit.json"
        run = subprocess.run([*command, "--output", str(file), *sys.argv[1:]], capture_output=True, text=True)
        if not file.exists():  # its exit status is the same as for a vulnerability
            reason = run.stderr.strip().rpartition("\n")[2]
            print(f"NOTHING WAS CHECKED, for pip-audit failed: {reason}", file=sys.stderr)
            return 2
        packages = json.loads(file.read_text("utf-8"))["dependencies"]
    skipped = [f"{each['name']}: {each['skip_reason']}" for each in packages if "skip_reason" in each]
    found = [(each, vulnerability) for each in packages for vulnerability in each.get("vulns", ())]
    for each, vulnerability in found:
        fixed = ", ".join(vulnerability["fix_versions"]) or "nothing yet"
        print(f"{each['name']} {each['version']}: {vulnerability['id']}, fixed in {fixed}")
    for line in skipped:
        print(f"not looked up: {line}", file=sys.stderr)
    print(f"{len(packages) - len(skipped)} packages were looked up, {len(found)} vulnerabilities are known")
    if found:
        return 1
    return 2 if skipped else 0


if __name__ == "__main__":
    sys.exit(main())
