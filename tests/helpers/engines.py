"""Tables of predictions for engines, their partitions, and comparisons with one process."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.shards import assert_same, data_set

import torchcalib as tc
from torchcalib.results.report import Report

pa = pytest.importorskip("pyarrow")

QUICK = {"with_calibration": False, "with_intervals": False}
ENDS = (0, 37, 37, 120, 200)  # ends of partitions; two are empty


def table_of(task, n=240, weights="counts", lists=False, text=False):
    """Return a table of probabilities, targets, weights, groups, clusters and the probabilities of a second system."""
    arrays = data_set(task, n, weights)
    logits = arrays["logits"].astype(float)
    one = {"": logits, "sharp_": 2 * logits}
    columns = {}
    for prefix, values in one.items():
        if task == "multiclass":
            odds = np.exp(values)
            probs = odds / odds.sum(1, keepdims=True)
        else:
            probs = 1 / (1 + np.exp(-values))
        if probs.ndim == 1:
            columns[f"{prefix}prob"] = probs
        elif lists:
            columns[f"{prefix}probs"] = pa.FixedSizeListArray.from_arrays(probs.ravel(), probs.shape[1])
            columns[f"{prefix}probs"] = columns[f"{prefix}probs"].cast(pa.list_(pa.float32()))
        else:
            columns |= {f"{prefix}prob_{name}": probs[:, k] for k, name in enumerate("abcd")}
    target = arrays["targets"]
    if target.ndim > 1:
        columns |= {f"y_{name}": target[:, k] for k, name in enumerate("abcd")}
    else:
        columns["target"] = np.array(list("abcd"))[target] if text else target
    rows = np.arange(n)
    extra = {"site": np.array(["north", "", "Süd"])[rows // 7 % 3], "patient": rows // 2, "row": rows}
    return pa.table({**columns, "weight": arrays.get("weights", np.ones(n, int)), **extra})


def pieces(table, ends=ENDS):
    """Cut a table into partitions at the rows `ends`."""
    starts = (0, *ends)
    return [table.slice(a, b - a) for a, b in zip(starts, (*ends, table.num_rows), strict=True)]


def assert_equal(found, expected):
    """Compare results as plain values to 1e-12, except for the time of their creation."""
    found, expected = found.to_dict(), expected.to_dict()
    assert_same(found, {**expected, "created": found["created"]})


CASES = {
    "binary": (("binary",), {}),
    "groups": (("binary",), {"groups": "site"}),
    "clusters": (("binary",), {"clusters": "patient", "n_bins": 7, "right": True}),
    "lists": (("multiclass", 240, "counts", True), {"preds": "probs"}),
    "text targets": (("multiclass", 240, "counts", False, True), {"preds": "prob"}),
    "class columns": (("multiclass",), {"preds": "prob", "groups": "site", "clusters": "patient"}),
    "multilabel": (("multilabel",), {"preds": "prob", "target": "y_*", "task": "multilabel"}),
}
"""Arguments of `table_of` and options of a report, by name."""

SYSTEMS = {"first": "prob", "second": "sharp_prob"}


def report_of(table, **options):
    """Return the report of a table in one process."""
    names = ("preds", "target", "weights", "groups", "clusters", "from_logits", "task", "class_names")
    opening = {"frame": table, **{name: options.pop(name, None) for name in names}}
    return Report._read((), opening, **options)


def comparison_of(table, **options):
    """Return the comparison of `SYSTEMS` in one process."""
    columns = {name: np.array(table.column(preds)) for name, preds in SYSTEMS.items()}
    weights = np.array(table.column("weight"))
    found = tc.compare(columns, np.array(table.column("target")), weights=weights, **options)
    return replace(found, settings={**found.settings, "from_logits": dict.fromkeys(SYSTEMS, False)})
