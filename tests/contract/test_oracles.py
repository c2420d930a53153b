"""Scores and errors over equal-width bins compared with loops: values, and gradients by finite differences.

The loops for rank-based metrics are in tests/metrics/test_ranked.py, for smooth errors in tests/metrics/test_smooth.py.
"""

import oracles
import pytest
import torch
from cases import CASES, N_CLASSES, Case, differentiable
from oracles import input as slow

import torchcalib as tc
import torchcalib.functional as F
from torchcalib.core.event_sums import EqualWidthBins
from torchcalib.core.state import SumState
from torchcalib.core.sums import ScoreAccumulator

ADDITIVE = [
    case
    for case in CASES
    if isinstance(case.metric().kind, SumState)
    and isinstance(case.metric().accumulator, ScoreAccumulator | EqualWidthBins)
]
BY_CLASS = {
    cls.__name__: [case for case in ADDITIVE if case.cls is cls] for cls in {case.cls: None for case in ADDITIVE}
}
by_class = pytest.mark.parametrize("cases", BY_CLASS.values(), ids=list(BY_CLASS))


def oracle(case, preds, target, weights=None):
    settings = {name: v.tolist() if name == "priors" else v for name, v in case.options.items()}
    reading = {name: settings.pop(name) for name in ("from_logits", "positive_classes") if name in settings}
    reading = {"from_logits": False, **reading}
    call = slow.Call(case.function, case.cls, case.task, N_CLASSES, settings, reading, preds, target, weights)
    call.own = case.own
    return slow.expected(call)[0]


@by_class
def test_values_equal_slow_loops(cases):
    """Three unweighted samples and one weighted sample."""
    for case in cases:
        weights = torch.rand(35, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        weights[::5] = 0
        if case.options.get("debiased"):
            weights = weights.mul(4).round()  # debiasing requires whole weights
        for seed, given in ((0, None), (1, None), (2, None), (0, weights)):
            data = case.data(n=35, seed=seed)
            found, expected = case.call(*data, weights=given), oracle(case, *data, given)
            what = f"{case}, seed {seed}, {'plain' if given is None else 'weighted'}"
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13, msg=lambda m, w=what: f"{w}: {m}")


@by_class
def test_gradients_equal_finite_differences_of_slow_loops(cases):
    """Compare three gradient entries with central differences of the loop."""
    for case in filter(differentiable, cases):
        n = 24 if "priors" in case.options else 6
        preds, target = case.data(n=n, seed=1)
        leaf = preds.clone().requires_grad_()
        case.call(leaf, target, validate_args=False).sum().backward()
        for at in [(0,), (3,), (5,)] if case.task == "binary" else [(0, 0), (3, 2), (5, 3)]:
            step = torch.zeros_like(preds)
            step[at] = 1e-6
            slope = (oracle(case, preds + step, target) - oracle(case, preds - step, target)).sum().item() / 2e-6
            assert leaf.grad[at].item() == pytest.approx(slope, rel=1e-6, abs=1e-8), (str(case), at)


@pytest.mark.parametrize("from_logits", [False, True])
@pytest.mark.parametrize(("task", "mode"), [(task, mode) for task, allowed in slow.MODES.items() for mode in allowed])
def test_calibration_curve_equals_slow_loop(task, mode, from_logits):
    """Check every column, including the mean entropic calibration difference (ECD) for each mode."""
    options = {"from_logits": from_logits, "mode": mode, "n_bins": 6}
    case = Case("table", F.calibration_curve, tc.ECE, task, options)
    preds, target = case.data(n=60)
    weights = torch.arange(60) % 3
    table = case.call(preds, target, weights=weights)
    columns = {name: torch.from_numpy(column).reshape(-1, 6) for name, column in table.to_dict().items()}
    reading = {"from_logits": from_logits, "ignore_index": None, "positive_classes": None}
    event_columns = []  # (confidence, outcome, weight, ECD) for each batch element
    for rows in slow.series(preds, target, weights, task, whole=False, **reading):
        events = slow.events(rows, *((task, mode) if task != "multilabel" else ("binary", "positive")))
        for k, column in enumerate(events):
            if task == "multiclass" and mode == "classwise":
                scored = [slow.binary_row(row.q[k], row.t[k], row.w, False) for row in rows]
            else:
                scored = rows
            _, confidence, outcome, held, _ = zip(*column, strict=True)
            event_columns.append((confidence, outcome, held, [oracles.ecd_of(row.q, row.t) for row in scored]))
    assert len(event_columns) == len(columns["n"])
    for k, (confidence, outcome, held, scores) in enumerate(event_columns):
        bins = oracles.bins(confidence, outcome, held, 6, extra=scores)
        assert [b for b, *_ in bins] == columns["n"][k].nonzero().flatten().tolist()
        for b, n, mean_confidence, frequency, mean_ecd in bins:
            row = {name: column[k, b].item() for name, column in columns.items()}
            assert (row["lower"], row["upper"], row["n"]) == (b / 6, (b + 1) / 6, n)
            expected = [n / sum(held), mean_confidence, frequency, frequency - mean_confidence, mean_ecd]
            found = [row[name] for name in ("share", "confidence", "frequency", "gap", "ecd")]
            assert found == pytest.approx(expected, rel=1e-11, abs=1e-12)
