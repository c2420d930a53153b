"""Reports gathered from several ranks equal those of one process."""

import json
import signal

import pytest
from helpers.shards import add_to, assert_same
from processes import SCRIPTS, environments_of_ranks, free_ports, run_together
from processes.gathering_ranks import CASES, builder_of

from torchcalib.core import sample_or_sketch
from torchcalib.reporting import buffer
from torchcalib.reporting.building import ReportBuilder


def launched(n_ranks, folder, *more):
    """Start ranks, and return the exit codes and the outputs of those that ended normally."""
    environments = environments_of_ranks(n_ranks, free_ports(1)[0], PYTHONWARNINGS="error")
    codes, printed = run_together([[SCRIPTS / "gathering_ranks.py", folder, *more]] * n_ranks, environments)
    assert codes == [0] * (n_ranks - len(more)) + [-signal.SIGKILL] * len(more), printed
    return [json.loads((folder / f"output-{k}.json").read_text()) for k in range(n_ranks - len(more))]


@pytest.mark.extended
@pytest.mark.parametrize("n_ranks", [2, 4])
def test_gathered_reports_equal_that_of_one_process(n_ranks, tmp_path, monkeypatch):
    outputs = launched(n_ranks, tmp_path)
    for k, case in enumerate(CASES):
        with monkeypatch.context() as patch:
            for module in (sample_or_sketch, buffer):
                patch.setattr(module, "MAX_SAMPLES", case[-1] or module.MAX_SAMPLES)
            whole, arrays = builder_of(case)
            add_to(whole, arrays)
            found = ReportBuilder.load(tmp_path / f"gathered-{k}")
            assert_same(found.report().to_dict(), whole.report().to_dict(), str(case))
    for *calls, error in outputs:
        assert [sorted(each) for each in calls] == [[*["all_gather"] * 3, "all_to_all_single"]] * len(CASES)
        assert error == outputs[0][-1]
        assert "must have the same arguments, got n_bins=11 instead of n_bins=10" in error


@pytest.mark.extended
def test_a_killed_rank_is_an_error_on_the_others(tmp_path):
    for message in launched(3, tmp_path, "kills"):
        assert "all ranks must gather a report, got no answer from another rank" in message
