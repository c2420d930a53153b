"""Settings and fixtures shared by all tests."""

import json
import math
import os
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import formulas, paths
from hypothesis import settings

from torchcalib.ops import dispatch

# the same examples in every run, without time limits
settings.register_profile("here", deadline=None, derandomize=True)
settings.load_profile("here")
LEFT_OUT = list(filter(None, os.environ.get("TORCHCALIB_TEST_WITHOUT", "").split(",")))
LEFT_OUT += [name for name in ("triton", "numba") if name not in LEFT_OUT and find_spec(name) is None]
sys.modules.update(dict.fromkeys(LEFT_OUT))  # an entry of None makes the import fail
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    # Processes that share a cache may load a kernel while another process writes it, because numba does not lock its
    # index. Such a kernel may round differently.
    os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(sys.prefix) / "numba-cache" / worker))
# Small calls use plain torch however many there were. Tests of compiled loops ask for `backend="numba"`;
# TORCHCALIB_NUMBA=always compiles them in all tests.
dispatch.ENOUGH = math.inf
os.environ["SOURCE_DATE_EPOCH"] = "1767225600"  # reports are created on 2026-01-01, also at midnight
os.environ.pop("COLUMNS", None)  # the width of output to a pipe
# On small tensors and busy cores several threads are slower than one.
torch.set_num_threads(int(os.environ.get("TORCHCALIB_TEST_THREADS", "1")))


@pytest.fixture(autouse=True)
def without_earlier_calls():
    """Forget large calls of other tests, after which small calls would use compiled loops."""
    dispatch._saved.clear()


def pytest_configure(config):
    # pytest would otherwise leave a partly imported module in `sys.modules` after collecting its doctests.
    config.option.ignore_glob = [*(config.option.ignore_glob or []), *(f"*/ops/*{name}*.py" for name in LEFT_OUT)]


def pytest_report_header():
    return None if torch.cuda.is_available() else "no CUDA device: tests marked `cuda` are not collected"


def pytest_collection_modifyitems(config, items):
    here = {"cuda": torch.cuda.is_available(), "emulated": "TORCHCALIB_TEST_DEVICE" in os.environ}
    absent = {mark for mark, is_here in here.items() if not is_here}
    left_out = [item for item in items if absent.intersection(item.keywords)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not absent.intersection(item.keywords)]


@pytest.fixture(params=paths())
def path(request):
    """Case for each path from input to state; the extended run has one case per class and path."""
    return request.param


@pytest.fixture(params=formulas())
def formula(request):
    """Case for each formula that computes a value from a state; the extended run has one case per setting."""
    return request.param


def data_folder():
    """Return the folder of recorded inputs: $TORCHCALIB_DATA, or ../shared/data beside the project."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    return Path(os.environ.get("TORCHCALIB_DATA", default))


@pytest.fixture(scope="session")
def expected():
    """Return all recorded answers: a list of {file, case, metric, args, value, tolerance}."""
    path = data_folder() / "expected.json"
    if not path.is_file():
        pytest.skip(f"recorded answers are not in {path.parent}; set TORCHCALIB_DATA")
    return json.loads(path.read_text())


@pytest.fixture(scope="session")
def recorded(expected):
    """Return a function that loads a recorded input by name."""

    @cache
    def load(name):
        with np.load(data_folder() / name, allow_pickle=False) as arrays:
            return {key: torch.from_numpy(array) for key, array in arrays.items()}

    return load
