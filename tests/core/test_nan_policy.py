"""`nan_policy="drop"`: rows with NaN or invalid infinities are excluded, counted and shown.

The expected value is that of the metric for the remaining rows.
"""

from itertools import product

import pytest
import torch
from cases import CALLS, N_CLASSES, paths
from helpers.compare import close
from helpers.samples import updated
from torchmetrics import MetricCollection

import torchcalib as tc
import torchcalib.functional as F
from torchcalib.calibration import (
    AffineScaling,
    HistogramBinning,
    IsotonicCalibration,
    calibration_loss,
    cross_val_calibrate,
)
from torchcalib.core.inputs import InputFormat
from torchcalib.inference import bootstrap

NAN, INF = torch.nan, torch.inf
P, Y = torch.tensor([0.2, NAN, 0.7, 0.9]), torch.tensor([0, 1, 1, 0])


def with_missing_values(case, preds):
    """Return predictions with missing values in rows 3, 7 and 9, and a mask of the remaining rows."""
    preds = preds.clone()
    logits, per_class = case.options.get("from_logits"), case.task == "multiclass"
    preds[3] = NAN
    preds[7] = -INF if per_class or not logits else NAN
    if per_class:
        preds[9, 1] = NAN if logits else INF  # a single missing entry drops the row
    else:
        preds[9] = NAN if logits else -INF
    left = torch.ones(len(preds), dtype=torch.bool)
    left[[3, 7, 9]] = False
    return preds, left


@pytest.mark.parametrize("path", paths(cases=CALLS))
def test_law_dropped_rows_have_no_effect_and_no_gradient(path, monkeypatch):
    preds, target = path.data(n=40)
    bad, left = with_missing_values(path, preds)
    n = 3 * (N_CLASSES if path.task == "multilabel" else 1)
    leaf = bad.clone().requires_grad_()
    value = path.call(leaf, target, nan_policy="drop")
    close(value, path.call(preds[left], target[left]))
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        rows = preds.to(dtype)
        close(
            path.call(with_missing_values(path, rows)[0], target, nan_policy="drop"),
            path.call(rows[left], target[left]),
        )
    if path.differentiable:
        value.sum().backward()
        assert leaf.grad.isfinite().all()
        assert not leaf.grad[~left].any()
    if path.cls is None:
        return
    weights = path.weights(40)
    metric, clean = path.metric(nan_policy="drop"), path.metric()
    metric.update(bad, target, weights=weights)
    clean.update(preds[left], target[left], weights=weights[left])
    close(metric(bad, target), clean(preds[left], target[left]))
    close(metric.compute(), clean.compute())
    absent = int((weights[~left] == 0).sum()) * (n // 3)
    assert metric.n_dropped() == 2 * n - absent
    other = path.metric(nan_policy="drop")
    other.update(bad, target)
    other.merge_state(metric)
    assert other.n_dropped() == 3 * n - absent
    metric.reset()
    assert metric.n_dropped() == 0

    # The path of `update` on CUDA, tested on the CPU, where values can be read
    original = InputFormat.read
    monkeypatch.setattr(InputFormat, "read", lambda self, *a, **k: original(self, *a, **{**k, "drop_invalid": True}))
    metric.update(bad, target)
    assert metric.kind.n_ignored(metric.state).tolist() == [0, n]
    close(metric.compute(), path.call(preds[left], target[left]).double())
    wrong = target.clone()
    wrong[[3, 5]] = 99  # row 3 is dropped, so that only the label of row 5 is an error
    metric.update(bad, wrong)
    assert metric.kind.n_ignored(metric.state).tolist() == [n // 3, 2 * n]
    with pytest.raises(ValueError, match=rf"got {n // 3} with NaN"):
        metric.compute()


def test_multilabel_drops_single_entries_like_ignore_index():
    generator = torch.Generator().manual_seed(0)
    preds = torch.rand(30, 3, generator=generator)
    target = torch.randint(0, 2, (30, 3), generator=generator)
    bad, ignored = preds.clone(), target.clone()
    bad[4, 1], bad[5, 2], bad[4, 2] = NAN, INF, -INF
    ignored[[4, 5, 4], [1, 2, 2]] = -100
    for function in (F.nll, F.ece, F.ks):
        options = {"task": "multilabel", "average": None, "weights": torch.arange(30)}
        found = function(bad, target, nan_policy="drop", **options)
        close(found, function(preds, ignored, ignore_index=-100, **options))
    metric = updated(tc.NLL(task="multilabel", num_labels=3, nan_policy="drop"), (bad, target))
    assert metric.n_dropped() == 3


@pytest.mark.parametrize("task", ["binary", "multiclass", "multilabel"])
def test_rows_with_missing_soft_targets_are_dropped(task):
    generator = torch.Generator().manual_seed(0)
    preds, target = torch.rand(2, *((20,) if task == "binary" else (20, 3)), generator=generator)
    if task == "multiclass":
        preds, target = preds / preds.sum(-1, keepdim=True), target / target.sum(-1, keepdim=True)
    left = torch.arange(20) != 4
    own = {"num_labels": 3} if task == "multilabel" else {}
    metrics = (F.brier_score, tc.BrierScore), (F.ece, tc.ECE), (F.ks, tc.KS)
    for missing, (function, cls) in product((NAN, INF, -INF), metrics):
        bad, leaf = target.clone(), preds.clone().requires_grad_()
        bad[4] = torch.tensor([missing, 0, 0]) if task == "multiclass" else missing
        value = function(leaf, bad, task=task, nan_policy="drop")
        torch.testing.assert_close(value, function(preds[left], target[left], task=task))
        value.backward()
        assert leaf.grad.isfinite().all()
        assert not leaf.grad[4].any()
        metric = updated(cls(task=task, nan_policy="drop", **own), (preds, bad))
        assert metric.n_dropped() == (3 if task == "multilabel" else 1)
        with pytest.raises(ValueError, match="`target` must"):
            function(preds, bad, task=task)


def test_rows_without_weight_or_label_are_not_counted_as_dropped_and_infinite_logits_are_valid():
    metric = tc.NLL(task="multiclass", from_logits=True, ignore_index=-1, nan_policy="drop")
    logits = torch.tensor([[NAN, 0.0], [NAN, 0.0], [INF, 0.0], [-INF, 0.0], [-INF, -INF], [0.0, 0.0]])
    target = torch.tensor([-1, 0, 0, 1, 0, 1])
    metric.update(logits, target, weights=torch.tensor([1, 0, 1, 1, 1, 1]))
    assert metric.n_dropped() == 1
    close(metric.compute(), torch.tensor(2.0, dtype=torch.float64).log() / 3)
    metric.reset()
    metric.update(logits[:2], torch.tensor([0, 0]))  # all rows are dropped or have weight 0
    assert metric.compute().isnan()
    assert metric.n_dropped() == 2
    binary = tc.NLL(task="binary", from_logits=True, nan_policy="drop")
    binary.update(torch.tensor([INF, -INF, NAN]), torch.tensor([1, 0, 1]))
    assert (binary.compute(), binary.n_dropped()) == (0, 1)
    scores = F.nll(P, Y, task="binary", nan_policy="drop", reduction="none")
    assert scores.isnan().tolist() == [False, True, False, False]


def test_other_bad_values_raise_errors_with_nan_policy_drop():
    labels, ones = [0, 1, 1], [1.0, 1.0, 1.0]
    for preds, target, weights, message in (
        ([0.2, NAN, 1.5], labels, ones, r"`preds` must be probabilities in \[0, 1\], got 1.5 \(1 of 3 rows\)"),
        ([0.2, NAN, -3e38], labels, ones, r"`preds` must be probabilities in \[0, 1\], got -3e\+38 \(1 of 3 rows\)"),
        ([0.2, NAN, 0.5], [0, 1, 2], ones, r"`target` must be a class index in \[0, 1\], got 2 \(1 of 3 rows\)"),
        ([0.2, NAN, 0.5], labels, [1.0, 1.0, NAN], r"`weights` must be finite and non-negative"),
    ):
        metric = tc.ECE(task="binary", nan_policy="drop")
        with pytest.raises(ValueError, match=message):
            metric.update(torch.tensor(preds), torch.tensor(target), weights=torch.tensor(weights))
        assert (metric.n_dropped(), metric.update_count) == (0, 0)
    rows, target = torch.tensor([[0.5, 0.5], [NAN, 7.0], [0.5, 0.6]]), torch.tensor([0, 9, 1])
    with pytest.raises(ValueError, match=r"`preds` must sum to 1 over the class axis .* got 1\.1 \(1 of 3 rows\)"):
        F.ece(rows, target, task="multiclass", nan_policy="drop")
    # The label and the weight of a dropped row are not checked.
    given = {"task": "multiclass", "weights": torch.tensor([1.0, -5.0]), "nan_policy": "drop"}
    assert F.ece(rows[:2], target[:2], **given) == 0.5
    with pytest.raises(ValueError, match="`nan_policy` must be one of 'raise', 'drop', got 'skip'"):
        tc.ECE(task="binary", nan_policy="skip")


def test_traced_and_unchecked_functions_drop_rows_instead_of_returning_nan():
    generator = torch.Generator().manual_seed(0)
    preds = torch.randn(3, 20, 4, generator=generator).softmax(-1)
    target = torch.randint(0, 4, (3, 20), generator=generator)
    preds[0, 5, 1], preds[2, 7] = NAN, INF

    def read(p, t, **options):
        return F.ece(p, t, task="multiclass", nan_policy="drop", **options)

    expected = torch.stack([read(p, t) for p, t in zip(preds, target, strict=True)])
    assert expected.isfinite().all()
    close(read(preds[2], target[2], validate_args=False), expected[2])
    torch.testing.assert_close(torch.vmap(read)(preds, target), expected)
    compiled = torch.compile(read, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(preds, target, batch_dims=1), expected)
    target[1, 0] = 9
    assert torch.vmap(read)(preds, target).isnan().tolist() == [False, True, False]


def test_collection_members_and_bootstrapped_metrics_use_their_own_nan_policy():
    def made(policy):
        return tc.NLL(task="binary", nan_policy=policy)

    metrics = tc.CalibrationCollection({"a": made("raise"), "b": made("drop")}, prefix="v/")
    with pytest.raises(ValueError, match="must not contain NaN"):
        metrics.update(P, Y)
    assert metrics.n_dropped() == {"v/a": 0, "v/b": 0}
    joined = MetricCollection({"a": made("raise"), "b": made("drop")})
    joined.update(torch.tensor([0.5]), torch.tensor([1]))
    assert len(joined.compute_groups) == 2
    found, expected = (tc.Bootstrapped(made(policy), n_replicates=39) for policy in ("drop", "raise"))
    both = updated(tc.CalibrationCollection({"b": made("drop"), "found": found}, prefix="v/"), (P, Y))
    expected.update(P.nan_to_num(0.5), Y, weights=torch.tensor([1, 0, 1, 1]))
    assert both.n_dropped() == {"v/b": 1, "v/found": 1}
    close(both.compute()["v/b"], expected.compute())
    close(found.interval().replicates, expected.interval().replicates)
    assert found.interval().value == found.compute()


def test_bootstrap_and_calibration_functions_accept_nan_policy():
    generator = torch.Generator().manual_seed(0)
    preds = torch.rand(60, generator=generator)
    target = torch.randint(0, 2, (60,), generator=generator)
    bad, weights = preds.clone(), torch.ones(60)
    bad[7], weights[7] = NAN, 0
    drawn, expected = (
        bootstrap(F.ece, p, target, task="binary", n_replicates=39, **how)
        for p, how in ((bad, {"nan_policy": "drop"}), (preds, {"weights": weights}))
    )
    close(drawn.replicates, expected.replicates)
    after = cross_val_calibrate(bad, target, task="binary", nan_policy="drop")
    assert after.isnan().nonzero().flatten().tolist() == [7]
    of_set = {"task": "multiclass", "positive_classes": [1]}
    rows, some = (torch.stack((1 - p, p), -1) for p in (bad, preds))
    for bad_rows, good_rows, options in (
        (bad, preds, {"task": "binary", "calibrator": AffineScaling()}),
        (bad, preds, {"task": "binary", "calibrator": IsotonicCalibration()}),
        (bad, preds, {"task": "binary", "calibrator": HistogramBinning()}),
        (rows, some, of_set),
    ):
        found = calibration_loss(bad_rows, target, nan_policy="drop", score="brier", **options)
        expected = calibration_loss(good_rows, target, weights=weights, score="brier", **options)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("soft", [False, pytest.param(True, marks=pytest.mark.extended)])
@pytest.mark.parametrize("task", ["binary", "multiclass", "multilabel"])
def test_reports_use_the_remaining_rows_and_count_the_dropped_ones(task, soft):
    generator = torch.Generator().manual_seed(0)
    preds = torch.rand((80,) if task == "binary" else (80, 3), generator=generator)
    preds = preds / preds.sum(-1, keepdim=True) if task == "multiclass" else preds
    target = torch.randint(0, 2, preds.shape if task == "multilabel" else (80,), generator=generator)
    if soft:
        target = (torch.nn.functional.one_hot(target, 3) if task == "multiclass" else target).float()
    bad, gone = preds.clone(), target.clone()
    bad[3] = (gone if soft else bad)[5] = NAN
    left = ~torch.isin(torch.arange(80), torch.tensor([3, 5]))
    n, what = (6, "entries") if task == "multilabel" else (2, "samples")
    kinds = (None, 1 + torch.arange(80) % 3, 0.5 + torch.arange(80) % 3)
    for weights in kinds if task == "binary" else kinds[2:]:
        given = {"task": task, "with_intervals": False}
        given |= {"with_calibration": weights is None and task == "binary"}
        found = tc.report(bad, gone, weights=weights, nan_policy="drop", **given)
        expected = tc.report(preds, target, weights=left.long() if weights is None else left * weights, **given)
        assert (found.n_dropped, expected.n_dropped, found.n) == (n, 0, expected.n)
        assert found.notes[-1].startswith(f"{n} {what} with NaN")
        assert f"({n} dropped for NaN)" in found.input_line
        assert dict(found) == pytest.approx(dict(expected), rel=1e-9, abs=1e-12, nan_ok=True)
        if given["with_calibration"]:
            wanted = [line.nll for line in expected.calibration.lines]
            assert [line.nll for line in found.calibration.lines] == pytest.approx(wanted, rel=1e-9)
