"""Real gloo processes with uneven shares, one of them empty, agree with one process. The work is in rank.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_ranks_agree_with_one_process(world, tmp_path):
    here = Path(__file__).parent
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)]), "PYTHONWARNINGS": "ignore"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(here / "rank.py"), str(rank), str(world), str(tmp_path / "store")],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    said = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(said)
