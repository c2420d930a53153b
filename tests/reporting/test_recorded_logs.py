"""Small logs that the programs themselves wrote contain what is known about them."""

import pytest
from conftest import data_folder

from torchcalib import audit
from torchcalib.io.errors import InputError

pytestmark = pytest.mark.skipif(not (data_folder() / "logs").is_dir(), reason="recorded logs need TORCHCALIB_DATA")


def audited(name):
    return audit(data_folder() / "logs" / name, with_calibration=False, with_intervals=False)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("lm_eval", "lm-eval samples: 10 answers to 10 questions"),
        ("inspect/data_arc_qwen.json", "Inspect log: 3 answers to 3 questions"),
        ("inspect/data_pubmedqa_gpt4o_mini.json", "Inspect log: 2 answers to 2 questions"),
        ("inspect/log_read_sample.eval", "Inspect log: 1 answers to 1 questions"),
    ],
)
def test_logs_without_a_confidence_have_their_number_of_answers(name, line):
    found = audited(name)
    assert (found.input_line, list(found)) == (line, [])
    assert "contains no confidence" in found.notes[0]


def test_log_probabilities_of_0_in_helm_are_degenerate():
    found = audited("helm")
    assert found.input_line == "HELM run: 10 answers to 10 questions"
    assert list(found) == ["raw", "per_token", "first_token"]
    assert all("every probability is 1" in each.marks[0] and each.report is None for each in found.values())


def test_a_log_without_scores_raises_an_error():
    with pytest.raises(InputError, match="sample without a score: 10"):
        audited("inspect/2025-02-11T15-17-00-05-00_popularity_dPiJifoWeEQBrfWsAopzWr.eval")
