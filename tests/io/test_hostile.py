"""Files that would exhaust memory or time give an error."""

import json
import subprocess
import sys

import pytest
import torch
from helpers.hostile_files import MB, write_corpus
from processes import SCRIPTS, quick_environment

import torchcalib as tc
from torchcalib.reporting.building import ReportBuilder

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of memory are those of Linux")


@pytest.mark.parametrize("is_long", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_hostile_files_are_read_or_refused_within_4_times_their_size_and_300_mb(tmp_path, is_long):
    """Each file is read in a process with limits of memory and time."""
    pytest.importorskip("pyarrow")
    pytest.importorskip("safetensors")
    cases = write_corpus(tmp_path, is_long)
    assert len({case.arguments for case in cases}) == len(cases) >= 60
    fast = ("--no-intervals", "--no-calibration")
    commands = [[[*c.arguments, *(fast if c.arguments[0] == "report" else ())], c.size] for c in cases]
    done = subprocess.run(
        [sys.executable, SCRIPTS / "limited.py"], input=json.dumps(commands), text=True,
        env=quick_environment(), capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    _, _, found = done.stdout.partition("READY\n")
    wrong = []
    for case, line in zip(cases, found.splitlines(), strict=True):
        code, output, growth = json.loads(line)
        if case.error is None:
            is_right = code == 0
        else:
            message = output.partition("torchcalib: error: ")[2]
            is_right = code == 2 and case.error in message and message.count("\n") == 1 and len(message) <= 501
        if not is_right or growth > 4 * case.size + 300 * MB:
            wrong.append((case.arguments[1:], code, growth and growth // MB, case.error, output[-600:]))
    assert not wrong


@pytest.mark.extended
@pytest.mark.parametrize("task", ["multiclass", "multilabel"])
def test_a_billion_classes_give_an_error_before_memory_is_allocated(task):
    row = torch.zeros(1, dtype=torch.float16).expand(1, 10**9)  # an expanded tensor of two bytes
    target = torch.zeros(1, dtype=torch.int64)
    target = target if task == "multiclass" else target.expand(1, 10**9)
    with pytest.raises(ValueError, match=r"must have at most .* with 15 bins, got 1,000,000,000"):
        ReportBuilder(task=task, from_logits=True).update(row, target)
    with pytest.raises(ValueError, match=r"must have at most .* with 15 bins, got 1,000,000,000"):
        tc.compare({"a": row, "b": row}, target, task=task, from_logits=True)
