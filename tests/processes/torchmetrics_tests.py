"""Run torchmetrics' own tests of the calibration error on `torchcalib.torchmetrics`.

    git clone --depth 1 --branch v1.9.0 https://github.com/Lightning-AI/torchmetrics
    pip install cachier netcal pytest scipy
    python tests/processes/torchmetrics_tests.py torchmetrics [options of pytest]

The tests are copied to a temporary folder, and their imports of the calibration error are replaced. All of them pass.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
FILE = Path("classification", "test_calibration_error.py")
IMPORT = re.compile(r"from torchmetrics(\.functional)?\.classification\.calibration_error import")


def copied(checkout, folder):
    """Copy the tests and their helpers from a checkout of torchmetrics, and replace the imports of what they test."""
    source = Path(checkout, "tests", "unittests")
    for path in ("__init__.py", "conftest.py", "_helpers", "classification/__init__.py", "classification/_inputs.py"):
        target = folder / "unittests" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (source / path).is_dir() else shutil.copy)(source / path, target)
    text, n_replaced = IMPORT.subn("from torchcalib.torchmetrics import", (source / FILE).read_text(encoding="utf-8"))
    if n_replaced != 2:
        raise SystemExit(f"{source / FILE} must import the class and the function of the calibration error.")
    (folder / "unittests" / FILE).write_text(text, encoding="utf-8")


def main():
    """Run the tests, and return the exit code of pytest."""
    checkout, *options = sys.argv[1:]
    with TemporaryDirectory() as name:
        folder = Path(name)
        copied(checkout, folder)
        (folder / "pytest.ini").write_text("[pytest]\nmarkers = DDP\n")
        path = os.pathsep.join(map(str, filter(None, [folder, ROOT, os.environ.get("PYTHONPATH")])))
        environment = {**os.environ, "PYTHONPATH": path, "USE_PYTEST_POOL": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "--rootdir", name, *options, folder / "unittests" / FILE]
        return subprocess.run(command, env=environment, cwd=folder, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
