"""Metrics in worker processes of data loaders, which must compute or raise, and never wait forever."""

import multiprocessing

import pytest
from processes import SCRIPTS, run_python

METHODS = ["fork", *(pytest.param(name, marks=pytest.mark.extended) for name in ("forkserver", "spawn"))]


@pytest.mark.parametrize("start_method", METHODS)
def test_workers_of_a_data_loader_compute_metrics(start_method):
    if start_method not in multiprocessing.get_all_start_methods():
        pytest.skip("the system does not have this start method")
    done = run_python(SCRIPTS / "loader_workers.py", start_method)
    assert done.returncode == 0, done.stderr
