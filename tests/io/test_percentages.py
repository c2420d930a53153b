"""Columns of percentages, and of words for outcomes."""

import numpy as np
import pandas as pd
import pytest

from torchcalib.io.errors import InputError
from torchcalib.io.opening import open_predictions

WORDS, CORRECT = ["correct", "incorrect", "correct", "incorrect"], [1, 0, 1, 0]


def written(folder, suffix, table):
    """Write a table as a file, and return its path."""
    path = folder / f"answers{suffix}"
    if suffix == ".npz":
        np.savez(path, **{name: column.to_numpy() for name, column in table.items()})
    else:
        write = {".csv": table.to_csv, ".jsonl": table.to_json, ".parquet": table.to_parquet}[suffix]
        write(path, **{".csv": {"index": False}, ".jsonl": {"orient": "records", "lines": True}}.get(suffix, {}))
    return path


NUMBERS = ([70, 1, 100, 0], [70.5, 0.0, 12.25, 100.0])
TEXTS = (["70%", "1.5 %", "100%", "0%"],)


@pytest.mark.parametrize(
    ("suffix", "confidence"),
    [
        *[(suffix, values) for suffix in (".csv", ".jsonl", ".parquet") for values in (*NUMBERS, *TEXTS)],
        *[(".npz", values) for values in NUMBERS],
    ],
)
def test_percentages_are_divided_by_100_with_a_warning(suffix, confidence, tmp_path):
    is_text = isinstance(confidence[0], str)
    table = pd.DataFrame({"confidence": confidence, "correct": CORRECT if suffix == ".npz" else WORDS})
    with pytest.warns(UserWarning, match=r"`confidence` in `.*` contains percentages, which are divided by 100"):
        files = open_predictions([written(tmp_path, suffix, table)])
    assert (files.task_of_report, files.source.are_percentages) == ("confidence", True)
    assert files.source.in_words()["predictions"] == "confidence, read as confidences, percentages divided by 100"
    rows = [each for chunk in files.chunks(max_bytes=16) for each in zip(chunk.preds, chunk.target, strict=True)]
    numbers = [float(text.strip(" %")) for text in confidence] if is_text else confidence
    assert [float(p) for p, _ in rows] == pytest.approx([k / 100 for k in numbers], rel=1e-15)
    assert [int(y) for _, y in rows] == CORRECT


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "confidence",
    [
        [0.7, 1.0, 0.2, 0.0],  # probabilities
        [0.7, 1.5, 0.2, 0.0],  # rounding errors or wrong values
        [0.7, 70.0, 90.0, 100.0],  # both scales
        [7.0, 10.0, 2.0, 5.0],  # ratings
        [70.0, 101.0, 2.0, 5.0],
        [-5.0, 70.0, 2.0, 5.0],
    ],
)
def test_other_numbers_are_left_as_they_are(confidence):
    files = open_predictions([], frame=pd.DataFrame({"confidence": confidence, "correct": CORRECT}))
    (rows,) = files.chunks()
    assert rows.preds.tolist() == confidence
    logits = open_predictions(
        [], frame=pd.DataFrame({"confidence": [70.0, 50.0, 20.0, 30.0], "correct": CORRECT}), from_logits=True
    )
    assert not logits.source.are_percentages


@pytest.mark.parametrize("confidence", [[7, 10, 2, 5], [0, 1, 1, 0], ["70%", "80", "1%", "2%"], ["high"] * 4])
def test_ambiguous_columns_are_refused(confidence):
    frame = pd.DataFrame({"confidence": confidence, "correct": CORRECT})
    with pytest.raises(InputError, match="divide percentages by 100"):
        open_predictions([], frame=frame)


def test_missing_percentages_are_dropped_like_missing_numbers():
    frame = pd.DataFrame({"confidence": ["70%", None, "20%", "30%"], "correct": CORRECT})
    with pytest.warns(UserWarning, match="percentages"):
        (rows,) = open_predictions([], frame=frame, nan_policy="drop").chunks()
    assert rows.preds.isnan().tolist() == [False, True, False, False]


def test_words_for_outcomes_of_confidences():
    confidence = [0.7, 0.2, 0.9, 0.4]
    frame = pd.DataFrame({"confidence": confidence, "correct": ["yes", "yes", "yes", "yes"]})
    (rows,) = open_predictions([], frame=frame).chunks()  # a single text is completed
    assert rows.target.tolist() == [1, 1, 1, 1]
    with pytest.raises(InputError, match=r"must contain outcomes such as `correct` and `incorrect`, got `bad`, `good`"):
        open_predictions([], frame=frame.assign(correct=["good", "bad", "bad", "good"]))
