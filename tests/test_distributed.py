"""Real gloo processes with uneven shares, one of them empty, agree with one process. The work is in rank.py."""

from pathlib import Path

import pytest
from processes import run_together


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_ranks_agree_with_one_process(world, tmp_path):
    script = Path(__file__).parent / "rank.py"
    codes, said = run_together([[script, rank, world, tmp_path / "store"] for rank in range(world)])
    assert codes == [0] * world, said
