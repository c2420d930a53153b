"""Groups of several columns: the combinations of their values, with missing values, through all entrances."""

import itertools

import numpy as np
import pytest
import torch
from helpers.reports import QUICK

import torchcalib as tc
import torchcalib.functional as F
from torchcalib.io import text

pd = pytest.importorskip("pandas")
RNG = np.random.default_rng(5)
N = 400
P, AGE, SEX = RNG.random(N), RNG.choice(["old", "young", ""], N), RNG.choice(["f", "m"], N)
WARD = RNG.integers(-1, 3, N)
Y = (RNG.random(N) < P).astype(int)
FRAME = pd.DataFrame({"age": AGE, "sex": SEX, "ward": WARD, "prob": P, "y": Y})
COLUMNS = {"age": AGE, "sex": SEX, "ward": torch.from_numpy(WARD)}
EXPECTED = {  # a slow loop over the rows
    f"age={age}, sex={sex}, ward={ward}": float(F.ece(P[rows], Y[rows]))
    for age, sex, ward in itertools.product(("old", "young"), ("f", "m"), range(3))
    if (rows := (age == AGE) & (sex == SEX) & (ward == WARD)).any()
}
KINDS = {
    "frame": FRAME[list(COLUMNS)],
    "dict": COLUMNS,
    "list of named columns": [FRAME[name] for name in COLUMNS],
    "missing values": FRAME[list(COLUMNS)].replace({"age": {"": None}, "ward": {-1: np.nan}}),
    "categories": FRAME[list(COLUMNS)].replace({"ward": {-1: np.nan}}).astype({"age": "category"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_functions_metrics_and_reports_have_the_combinations_of_columns(kind):
    groups = KINDS[kind]
    values = F.by_group(F.ece, P, Y, groups)
    assert dict(zip(values.group_names, values.tolist(), strict=True)) == pytest.approx(EXPECTED)
    levels = {"age": ["young", "old"], "sex": ["m", "f"], "ward": range(3)}
    metric = tc.ByGroup(tc.ECE(task="binary"), group_names=levels)
    assert metric.group_names[1] == "age=young, sex=m, ward=1"
    metric.update(P, Y, groups=groups)
    found = dict(zip(metric.group_names, metric.compute().tolist(), strict=True))
    assert {name: found[name] for name in EXPECTED} == pytest.approx(EXPECTED)
    table = tc.report(P, Y, groups=groups, **QUICK).groups
    assert table.n_groups == len(EXPECTED)
    assert [EXPECTED[name] for name in table.group] == pytest.approx(list(table.value))


def test_a_list_has_columns_or_rows_or_batches():
    columns = [np.array(["a", "b"]), torch.tensor([3, 3])]
    assert F.by_group(F.accuracy, [0.9, 0.2], [1, 1], columns).group_names == (
        "column 0=a, column 1=3",
        "column 0=b, column 1=3",
    )
    maps, rows = torch.rand(2, 2), [torch.tensor([0, 1]), torch.tensor([1, 1])]
    assert tc.report(maps, (maps > 0.5).long(), task="binary", groups=rows, **QUICK).groups.n_groups == 2


def test_values_may_contain_the_separators_of_names():
    groups = {"a": ["x, b=y", "x"], "b": ["z", "y, b=z"]}
    assert len(F.by_group(F.accuracy, [0.9, 0.2], [1, 1], groups)) == 2
    assert text.parts_of_group(text.crossed_text({"a": torch.tensor([1, -1]), "b": torch.tensor([2, 3])}).names[0]) == [
        "",
        "b=3",
    ]


def test_many_combinations_are_sorted(monkeypatch):
    before = F.by_group(F.accuracy, P, Y, COLUMNS)
    monkeypatch.setattr(text, "_CODES_PER_ROW", 0)
    after = F.by_group(F.accuracy, P, Y, COLUMNS)
    assert before.group_names == after.group_names
    assert before.tolist() == after.tolist()
