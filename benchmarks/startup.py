"""Measure the waiting time before any work: imports, help, the version, and the error for a wrong path.

    python -m benchmarks.startup            medians of 5 processes each
    python -m benchmarks.startup --rounds 9

Times are those of new processes on an idle machine. The goals are 0.5 s for a command that needs no tensors, and 0.2 s
for `import torchcalib` in addition to `import torch`.
"""

import argparse
import subprocess
import sys
import time
from statistics import median

COMMANDS = {
    "torchcalib --help": ["-m", "torchcalib", "--help"],
    "torchcalib --version": ["-m", "torchcalib", "--version"],
    "torchcalib report nope.csv": ["-m", "torchcalib", "report", "nope.csv"],
    "python -c pass": ["-c", "pass"],
    "import torch": ["-c", "import torch"],
    "import torch, torchcalib": ["-c", "import torch, torchcalib"],
    "import torch; torchcalib.ECE": ["-c", "import torch, torchcalib; torchcalib.ECE"],
}
GOAL, GOAL_OF_IMPORT = 0.5, 0.2


def seconds(arguments: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], capture_output=True, check=False)
    return time.perf_counter() - start


def main() -> int:
    """Print the medians, and return 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="number of processes of each kind (default: 5)")
    rounds = parser.parse_args().rounds
    found: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(rounds):  # alternate, so that a busy moment affects all of them
        for name, arguments in COMMANDS.items():
            found[name].append(seconds(arguments))
    medians = {name: median(times) for name, times in found.items()}
    for name, value in medians.items():
        print(f"{name:32} {value:6.3f} s")
    extra = medians["import torch, torchcalib"] - medians["import torch"]
    print(f"{'torchcalib on top of torch':32} {extra:6.3f} s")
    slow = [name for name in list(COMMANDS)[:3] if medians[name] > GOAL]
    return int(bool(slow) or extra > GOAL_OF_IMPORT)


if __name__ == "__main__":
    sys.exit(main())
