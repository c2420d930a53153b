"""Reports on a DataFrame that contains all columns, which are found by name as in a file."""

import numpy as np
import pytest

import torchcalib as tc

pd, pa = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
NAMES = np.array(["cat", "dog", "eel"])
PROBS = np.random.default_rng(0).dirichlet([1, 1, 1], 60)
LABELS = np.arange(60) % 3
QUICK = {"with_calibration": False, "with_intervals": False}
EXPECTED = tc.report(PROBS, LABELS, groups=NAMES[LABELS], weights=LABELS + 1, class_names=NAMES, **QUICK)


def table():
    columns = {f"prob_{name}": column for name, column in zip(NAMES, PROBS.T, strict=True)}
    return pd.DataFrame({**columns, "label": NAMES[LABELS], "weight": LABELS + 1, "site": NAMES[LABELS]})


def polars(frame):
    return pytest.importorskip("polars").from_pandas(frame)


@pytest.mark.parametrize("convert", [lambda frame: frame, pa.Table.from_pandas, polars])
@pytest.mark.parametrize("target", [None, "label"])
def test_columns_of_a_table_are_found_by_name(convert, target):
    found = tc.report(convert(table()), target, groups="site", **QUICK)
    assert found.class_names == tuple(NAMES)
    assert dict(found) == dict(EXPECTED)
    assert found.groups.rows() == EXPECTED.groups.rows()
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
    assert tc.report(frame, nan_policy="drop", **QUICK).n == EXPECTED.n - LABELS[3] - 1
    given = {"with_calibration": False, "safe_threshold": 0.5}
    array = tc.report(PROBS, LABELS, weights=LABELS + 1, **given)
    assert tc.report(table(), **given).decision.safety == array.decision.safety != ""
