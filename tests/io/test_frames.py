"""Reports on a DataFrame that contains all columns, which are found by name as in a file."""

import numpy as np
import pytest

import torchcalib as tc

pd, pa = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
NAMES = np.array(["cat", "dog", "eel"])
PROBS = np.random.default_rng(0).dirichlet([1, 1, 1], 60)
LABELS = np.arange(60) % 3
QUICK = {"with_calibration": False, "with_intervals": False}


def table():
    columns = {f"prob_{name}": column for name, column in zip(NAMES, PROBS.T, strict=True)}
    return pd.DataFrame({**columns, "label": NAMES[LABELS], "weight": LABELS + 1, "site": NAMES[LABELS]})


def polars(frame):
    return pytest.importorskip("polars").from_pandas(frame)


@pytest.mark.parametrize("convert", [lambda frame: frame, pa.Table.from_pandas, polars])
@pytest.mark.parametrize("target", [None, "label"])
def test_columns_of_a_table_are_found_by_name(convert, target):
    found = tc.report(convert(table()), target, groups="site", **QUICK)
    expected = tc.report(PROBS, LABELS, groups=NAMES[LABELS], weights=LABELS + 1, class_names=NAMES, **QUICK)
    assert found.class_names == tuple(NAMES)
    assert dict(found) == dict(expected)
    assert found.groups.rows() == expected.groups.rows()
    assert found.task_is_inferred
    assert found.source["predictions"] == "prob_cat..prob_eel, read as probabilities"


def test_columns_of_lists_and_of_words():
    frame = pd.DataFrame({"logits": list(np.log(PROBS)), "target": LABELS})
    assert tc.report(frame, **QUICK)["nll"] == pytest.approx(tc.report(PROBS, LABELS, **QUICK)["nll"])
    frame = pd.DataFrame({"p": PROBS[:, 0], "y": np.where(LABELS == 0, "Yes", "No")})
    assert tc.report(frame, **QUICK).class_names == ("No", "Yes")
    assert tc.report(frame, **QUICK)["ece"] == tc.report(PROBS[:, 0], LABELS == 0, **QUICK)["ece"]


def test_options_of_a_report_apply_to_a_table():
    frame = table()
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
