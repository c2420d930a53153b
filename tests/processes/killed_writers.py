"""Processes that are killed while they write files, as a script: `killed_writers.py FOLDER`. A failed check raises.

The system kills a process that writes beyond its largest file size. Like `kill -9`, this runs no code of the process.
"""

import os
import resource
import signal
import sys
from functools import partial
from pathlib import Path

import torch
from helpers import fits

import torchcalib as tc
from torchcalib.calibration import load_calibrator, save_calibrator

X, Y = fits.data(400)
OPTIONS = {**fits.multi, "with_calibration": False, "with_intervals": False}
BATCHES = ((X[:100], Y[:100]), (X[100:], Y[100:]))


def killed_at(size, write):
    """Run a function in a process that is killed when it has written `size` bytes to a file."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        write()
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status), status
    assert os.WTERMSIG(status) == signal.SIGXFSZ, status


def check_old_file_is_whole(path, write_old, write_new):
    """A writer that is killed at any point leaves the old file as it was. A later write replaces it."""
    write_old(path)
    old = path.read_bytes()
    for size in (0, 1, len(old) // 2, len(old) - 1):
        killed_at(size, lambda: write_new(path))
        assert path.read_bytes() == old, size
    missing = path.with_name(f"missing {path.name}")
    killed_at(len(old) // 2, lambda: write_old(missing))
    assert not missing.exists()


def builder_of(*batches, start=None):
    builder = tc.ReportBuilder(**OPTIONS) if start is None else start
    for batch in batches:
        builder.update(*batch)
    return builder


def check_calibrators(folder):
    old, new = (fits.fresh(fits.T).fit(scale * X, Y, **fits.multi) for scale in (1, 3))
    path = folder / "calibrator.pt"
    check_old_file_is_whole(path, partial(save_calibrator, old), partial(save_calibrator, new))
    assert torch.equal(load_calibrator(path)(X), old(X))
    save_calibrator(new, path)
    assert torch.equal(load_calibrator(path)(X), new(X))


def check_builders(folder):
    """A builder that is loaded after its process was killed gives the report of an uninterrupted run."""
    path = folder / "state.pt"
    check_old_file_is_whole(path, builder_of(BATCHES[0]).save, builder_of(*BATCHES).save)
    resumed = builder_of(BATCHES[1], start=tc.ReportBuilder.load(path))
    assert repr(resumed.report().to_dict()) == repr(builder_of(*BATCHES).report().to_dict())


def check_reports(folder):
    old, new = (builder_of(*batches).report() for batches in (BATCHES[:1], BATCHES))
    for name in ("report.json", "report.md"):
        check_old_file_is_whole(folder / name, old.save, new.save)


def main(folder):
    torch.set_num_threads(1)
    for check in (check_calibrators, check_builders, check_reports):
        check(Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
