"""Run commands of torchcalib one after the other, each in a forked process with limits of memory and time.

Reads a list of `[arguments, bytes of the files]` as JSON from stdin. Prints a line of JSON for each command: its exit
code or signal, its output, and the growth of its memory in bytes. The first command that needs a kernel compiles it,
which may take 100 MB. A command that grows too much therefore runs once more, with all kernels on disk.
"""

import json
import os
import re
import resource
import sys
import tempfile
from pathlib import Path

import safetensors  # noqa: F401
import torch

from torchcalib.cli import main

MB = 2**20
SECONDS = 300  # of the processor; others slow it down by filling its cache
LIMIT = 300 * MB  # growth in addition to 4 times the size of the files
OVERHEAD = 1500 * MB  # address space of threads and allocators, which does not need memory


def status(key):
    """Return a size from the status of this process, in bytes."""
    return int(re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)[1]) * 1024


def run(arguments, size, output):
    """Run a command in this process, and end the process with its exit code. Write the growth of the memory."""
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    limit = status("VmSize") + 4 * size + LIMIT + OVERHEAD
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    os.dup2(output, 1)
    os.dup2(output, 2)
    Path("/proc/self/clear_refs").write_text("5")  # resets the largest resident size
    before = status("VmRSS")
    code = main(arguments)
    sys.stdout.flush()
    os.write(output, f"\nGROWTH {status('VmHWM') - before}\n".encode())
    os._exit(code)


def measured(arguments, size):
    """Run a command in a forked process, and return its exit code or signal, its output and its growth."""
    with tempfile.TemporaryFile() as file:
        pid = os.fork()
        if pid == 0:
            run(arguments, size, file.fileno())
        _, code = os.waitpid(pid, 0)
        file.seek(0)
        output, _, growth = file.read().decode(errors="replace").rpartition("\nGROWTH ")
    return os.waitstatus_to_exitcode(code), output or growth, int(growth or 0) if output else None


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:  # imports, and compiles the kernels
        file.write("prob,target\n" + "0.5,1\n0.5,0\n" * 20)
        file.flush()
        assert main(["report", file.name, "--no-intervals", "--no-calibration"]) == 0
    print("READY", flush=True)
    for arguments, size in json.loads(sys.stdin.read()):
        code, output, growth = measured(arguments, size)
        if growth is not None and growth > 4 * size + LIMIT:
            code, output, growth = measured(arguments, size)
        print(json.dumps([code, output, growth]))
        sys.stdout.flush()
