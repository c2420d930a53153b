"""Start scripts and modules as processes, without the time to import torch and torchcalib.

These imports take seconds. `run_together` forks every process from a server that has already imported them. A process
has its own `__main__`, arguments, environment and exit code, as if Python had started it. `run_python` starts a new
Python process, in which optional packages are not imported.
"""

import contextlib
import multiprocessing
import os
import random
import runpy
import socket
import subprocess
import sys
import time
import warnings
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import pytest

SCRIPTS = Path(__file__).parent
TESTS = SCRIPTS.parent
ROOT = TESTS.parent
SECONDS = 840  # ends a process that hangs, also on a busy machine, before pytest ends the test


def quick_environment(**more):
    """Return environment variables for a process that imports this checkout without optional packages."""
    path = os.pathsep.join(map(str, filter(None, [SCRIPTS / "quick_start", TESTS, ROOT, os.environ.get("PYTHONPATH")])))
    # A process group starts only when all ranks are connected, so that a rank may end at once.
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TORCH_DIST_INIT_BARRIER": "1", **more}


def run_python(*arguments, timeout=SECONDS):
    """Run a new Python process with the variables of `quick_environment`, and return it with its output as text."""
    command = [sys.executable, *map(str, arguments)]
    options = {"capture_output": True, "text": True, "check": False, "timeout": timeout}
    return subprocess.run(command, env=quick_environment(), **options)


@cache
def _server():
    """Start the server, which imports this checkout, but processes no data and starts no threads."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        pytest.skip("processes are started by a fork server, which this system does not have")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "cases", "torchcalib", "torchcalib.cli"])
    os.unsetenv("COLUMNS")  # readline, which pytest imports, sets it for child processes only
    with mock.patch.dict(os.environ, quick_environment(PYTHONWARNINGS="ignore")):
        forkserver.ensure_running()
    return context


def _run(command, environment, folder, output):
    """Run a command in a forked process: a script, or `-m` and a module, with arguments."""
    sink = os.open(output, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(sink, stream)
    import torchcalib

    assert Path(torchcalib.__file__).parents[1] == ROOT, torchcalib.__file__
    os.chdir(folder)
    os.environ.update(environment)
    warnings.simplefilter(environment.get("PYTHONWARNINGS", "ignore"))
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")


def run_together(commands, environments=None, folder=".", timeout=SECONDS):
    """Run processes in parallel, and return their exit codes and their joint output.

    A command is a script, or `-m` and a module, with arguments. `environments` has additional variables for each
    process. Processes that still run after `timeout` seconds are killed.
    """
    with TemporaryDirectory() as temporary:
        outputs = [Path(temporary) / str(k) for k in range(len(commands))]
        folder, started = str(Path(folder).resolve()), []
        for command, environment, output in zip(commands, environments or [{}] * len(commands), outputs, strict=True):
            arguments = ([str(word) for word in command], environment, folder, str(output))
            started.append(_server().Process(target=_run, args=arguments))
            started[-1].start()
        try:
            deadline = time.monotonic() + timeout
            for process in started:
                process.join(max(0, deadline - time.monotonic()))
        finally:
            for process in started:
                process.kill()
                process.join()
        return [process.exitcode for process in started], "\n".join(output.read_text() for output in outputs)


def run_ranks(world, folder, module, function, *more, timeout=SECONDS):
    """Run `function(rank, world, folder, *more)` of a module in this folder on every rank; see `run_together`."""
    script = SCRIPTS / "one_rank.py"
    commands = [[script, module, function, rank, world, folder, *more] for rank in range(world)]
    return run_together(commands, timeout=timeout)


def free_ports(n):
    """Return the numbers of n free ports, as text.

    They are below the range from which systems assign ports to outgoing connections (32768 and above). Otherwise such a
    connection might take a port before a rank listens on it.
    """
    found = []
    while len(found) < n:
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", random.SystemRandom().randrange(10_000, 32_768)))
            found.append(str(free.getsockname()[1]))
    return found


def environments_of_ranks(n_ranks, port=None, **more):
    """Return the variables of each rank as set by torchrun, and `more`. By default the port is a free one."""
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port or free_ports(1)[0], **more}
    world |= {"WORLD_SIZE": str(n_ranks), "LOCAL_WORLD_SIZE": str(n_ranks)}
    return [{**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(n_ranks)]


def run_again_in_tritons_interpreter(path):
    """Run the CPU tests of a file in a new process, because Triton selects its interpreter on import."""
    import triton

    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 6):
        pytest.skip("Triton's interpreter works with numpy 2.4 from 3.6 on")
    # pytest cannot rewrite the assertions of modules that a forked process has already imported.
    command = ["-m", "pytest", "--assert=plain", "-p", "no:cacheprovider", "-k", "cpu", path]
    codes, output = run_together([command], [{"TRITON_INTERPRET": "1"}], folder=ROOT)
    assert codes == [0], output
