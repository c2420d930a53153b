"""Real gloo processes with uneven shares, one of them empty, agree with one process. The work is in rank.py."""

import pytest
from processes import SCRIPTS, run_together


@pytest.mark.parametrize("world", [2, *(pytest.param(n, marks=pytest.mark.extended) for n in (3, 4))])
def test_ranks_agree_with_one_process(world, tmp_path):
    codes, said = run_together([[SCRIPTS / "rank.py", rank, world, tmp_path / "store"] for rank in range(world)])
    assert codes == [0] * world, said
