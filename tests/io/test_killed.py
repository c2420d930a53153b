"""Files of writers that are killed."""

import os

import pytest
from processes import SCRIPTS, run_together


@pytest.mark.skipif(not hasattr(os, "fork"), reason="limits of file sizes need POSIX")
def test_killed_writers_leave_the_old_file_and_resumed_runs_give_the_uninterrupted_report(tmp_path):
    codes, output = run_together([[SCRIPTS / "killed_writers.py", tmp_path]], timeout=100)
    assert codes == [0], output
