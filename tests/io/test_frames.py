"""Tables in memory: reports, whose columns are found by name as in a file, percentages, and words for outcomes.

tests/contract has every layout through every entrance.
"""

import json

import numpy as np
import pytest

import torchcalib as tc
from torchcalib.io.errors import InputError
from torchcalib.io.opening import open_predictions

pd = pytest.importorskip("pandas")
NAMES = np.array(["cat", "dog", "eel"])
PROBS = np.random.default_rng(0).dirichlet([1, 1, 1], 60)
LABELS = np.arange(60) % 3
QUICK = {"with_calibration": False, "with_intervals": False}


def table():
    columns = {f"prob_{name}": column for name, column in zip(NAMES, PROBS.T, strict=True)}
    return pd.DataFrame({**columns, "label": NAMES[LABELS], "weight": LABELS + 1, "site": NAMES[LABELS]})


def test_options_of_a_report_apply_to_a_table():
    frame = table()
    assert tc.report(frame, **QUICK).source["predictions"] == "prob_cat..prob_eel, read as probabilities"
    frame.loc[3, "prob_cat"] = np.nan
    assert tc.report(frame, nan_policy="drop", **QUICK).n == table()["weight"].sum() - LABELS[3] - 1
    given = {"with_calibration": False, "safe_threshold": 0.5}
    array = tc.report(PROBS, LABELS, weights=LABELS + 1, **given)
    assert tc.report(table(), **given).decision.safety == array.decision.safety != ""


def test_objects_in_other_orders_need_labels_by_name(tmp_path):
    objects = [dict(zip(NAMES.tolist(), row, strict=True)) for row in PROBS.tolist()]
    objects[1::2] = [dict(reversed(each.items())) for each in objects[1::2]]
    nll = tc.nll(PROBS, LABELS)
    for labels in (NAMES[LABELS].tolist(), LABELS.tolist()):
        frame = pd.DataFrame({"probs": objects, "label": labels})
        frame.to_json(tmp_path / "a.jsonl", orient="records", lines=True, double_precision=15)
        frame.assign(probs=list(map(str, objects))).to_csv(tmp_path / "a.csv", index=False)
        for ask in (
            lambda labels=labels: tc.nll(objects, labels),
            lambda frame=frame: tc.report(frame, **QUICK)["nll"],
            lambda: tc.Report.from_files(tmp_path / "a.jsonl", **QUICK)["nll"],
            lambda: tc.Report.from_files(tmp_path / "a.csv", **QUICK)["nll"],
        ):
            if isinstance(labels[0], str):
                assert float(ask()) == pytest.approx(float(nll), rel=1e-12)
            else:
                with pytest.raises(ValueError, match=r"`(label|target)`.* must contain class names, got whole numbers"):
                    ask()


@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
def test_columns_named_by_numbers_of_any_dtype_match_labels(shape):
    frame, labels = pd.DataFrame(PROBS), (LABELS + 1).reshape(shape)
    for names in ([1, 2, 3], [1.0, 2.0, 3.0], ["1", "2", "3"]):
        frame.columns = names
        assert float(tc.nll(frame, labels)) == pytest.approx(float(tc.nll(PROBS, LABELS)), rel=1e-12)


# Percentages, and words for outcomes

WORDS, CORRECT = ["correct", "incorrect", "correct", "incorrect"], [1, 0, 1, 0]


@pytest.mark.parametrize("confidence", [[70, 1, 100, 0], [70.5, 0.0, 12.25, 100.0], ["70%", "1.5 %", "100%", "0%"]])
def test_percentages_are_divided_by_100_with_a_warning(confidence, tmp_path):
    given = {"paths": [], "frame": pd.DataFrame({"confidence": confidence, "correct": WORDS})}
    if confidence[0] == 70:
        np.savez(tmp_path / "a.npz", confidence=confidence, correct=CORRECT)
        given = {"paths": [tmp_path / "a.npz"]}
    with pytest.warns(UserWarning, match="`confidence` in `.*` contains percentages, which are divided by 100"):
        files = open_predictions(**given)
    assert (files.task_of_report, files.source.are_percentages) == ("confidence", True)
    assert files.source.in_words()["predictions"] == "confidence, read as confidences, percentages divided by 100"
    rows = [each for chunk in files.chunks(max_bytes=16) for each in zip(chunk.preds, chunk.target, strict=True)]
    numbers = [float(str(text).strip(" %")) for text in confidence]
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


@pytest.mark.parametrize("missing", ["text", "integers", "floats"])
def test_rows_with_a_missing_group_have_no_group_through_any_entrance(missing, tmp_path):
    """Other rows count for their group, and all rows for the whole."""
    part = np.arange(60) % 3
    column = {
        "text": np.where(part == 0, None, np.where(part == 1, "a", "b")),
        "integers": pd.array([None if k == 0 else k for k in part], dtype="Int64"),
        "floats": np.where(part == 0, np.nan, part),
    }[missing]
    frame = table().assign(part=column)
    frame.to_csv(tmp_path / "a.csv", index=False)
    frame.to_json(tmp_path / "a.jsonl", orient="records", lines=True, double_precision=15)
    frame.to_json(tmp_path / "a.json", double_precision=15)
    frame.to_parquet(tmp_path / "a.parquet")
    options = {"groups": "part", **QUICK}
    found = [
        tc.report(frame, **options),
        *(tc.Report.from_files(path, **options) for path in sorted(tmp_path.iterdir())),
    ]
    for report in found[1:]:
        assert report.groups.group == found[0].groups.group
        assert report.to_dict()["groups"]["value"] == pytest.approx(found[0].to_dict()["groups"]["value"], rel=1e-12)
    weights = table()["weight"].to_numpy()
    sizes = dict(zip(found[0].to_dict()["groups"]["group"], found[0].to_dict()["groups"]["n"], strict=True))
    assert sizes == {str(column[k]).removesuffix(".0"): float(weights[part == part[k]].sum()) for k in (1, 2)}
    assert found[0].n == weights.sum()


def test_json_of_columns_index_and_data_is_read_as_what_it_contains(tmp_path):
    rows = [{"prob": 0.2, "y": 0}, {"prob": 0.8, "y": 1}]
    frame = pd.DataFrame(rows, index=["first", "second"])
    frame.to_json(tmp_path / "index.json", orient="index")
    frame.to_json(tmp_path / "split.json", orient="split")
    (tmp_path / "rows.json").write_text(json.dumps({"columns": 2, "index": None, "data": rows}))
    (tmp_path / "named.json").write_text(json.dumps({"columns": ["prob", "y"], "index": [0, 1], "data": rows}))
    for path in tmp_path.iterdir():
        assert tc.Report.from_files(path, **QUICK)["ece"] == pytest.approx(0.2), path.name
