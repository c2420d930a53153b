"""Bootstrap of functions: metrics of resampled data, calibration losses and intervals."""

from functools import partial

import pytest
import torch
from cases import CASES
from helpers.bootstrap import BINARY, counts_of
from helpers.compare import close

import torchcalib as tc
import torchcalib.functional as F
from torchcalib.core import predictions
from torchcalib.inference import Interval, bootstrap

NAN = float("nan")


def test_replicates_of_every_metric_equal_the_metric_of_resampled_data(path):
    preds, target = path.data(n=25)
    found = bootstrap(path.function, preds, target, task=path.task, n_replicates=39, seed=1, **path.options)
    close(found.value, path.call(preds, target))
    for r, times in enumerate(counts_of(39, 25, seed=1)[:2].long()):
        drawn = path.call(preds.repeat_interleave(times, 0), target.repeat_interleave(times, 0))
        close(found.replicates[r], drawn)
    assert not bool((found.low > found.high).any())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", ["ece-debiased-binary-positive", "rmsce-debiased-multiclass-classwise"])
def test_drawn_copies_are_samples_of_debiased_errors(name, weighted):
    case = next(case for case in CASES if case.name == name)
    preds, target = case.data(n=25)
    weights = 1 + torch.arange(25) % 3
    given = {"weights": weights, **case.options} if weighted else case.options
    found = bootstrap(case.function, preds, target, task=case.task, n_replicates=39, seed=1, **given)
    for r, times in enumerate(counts_of(39, 25, seed=1)[:2].long()):
        times = times * weights if weighted else times
        drawn = case.call(preds.repeat_interleave(times, 0), target.repeat_interleave(times, 0))
        close(found.replicates[r], drawn)


def test_ends_without_bias_are_shifted_only_if_the_bias_exceeds_a_quarter_of_the_standard_error():
    """39 replicates of standard deviation s around the value plus a shift; at level 0.95 the ends are the extremes."""
    replicates = torch.linspace(-1, 1, 39, dtype=torch.float64)
    for shift, is_removed in ((0.0, False), (0.24, False), (-0.24, False), (0.26, True), (-3.0, True), (NAN, False)):
        moved = replicates + shift * replicates.std()
        low, high = Interval(torch.tensor(0.0, dtype=torch.float64), moved, 0.95).without_bias
        expected = replicates if is_removed else moved
        close(low, expected[0])
        close(high, expected[-1])


def test_replicates_computed_in_chunks_are_the_same(monkeypatch):
    sizes = []

    def spy(*args, **options):
        sizes.append(options["weights"].numel() if options["weights"] is not None else 0)
        return F.tce(*args, **options)

    case = next(case for case in CASES if case.name == "nll-multiclass-logits")
    loss = partial(tc.relative_calibration_loss, score="brier", n_repeats=1)
    given = {"task": "multiclass", "from_logits": True}
    for metric, (preds, target), options, most in (
        (spy, BINARY.data(n=50), {"task": "binary"}, 200),
        (loss, case.data(n=60), given, 60 * 4 * 6 * 3),
        (loss, (case.data(n=60)[0].T, case.data(n=60)[1]), {**given, "class_axis": 0}, 60 * 4 * 6 * 3),
    ):
        whole = bootstrap(metric, preds, target, n_replicates=45, **options)
        sizes.clear()
        with monkeypatch.context() as patch:
            patch.setattr(predictions, "_MAX_AT_ONCE", most)
            pieces = bootstrap(metric, preds, target, n_replicates=45, **options)
        close(pieces.replicates, whole.replicates, rtol=1e-8, atol=1e-8)
        if metric is spy:
            assert max(sizes) == 200
            other = bootstrap(metric, preds, target, n_replicates=45, seed=1, **options)
            assert not torch.equal(other.replicates, whole.replicates)


def test_ignored_samples_are_not_drawn_and_weights_apply_to_every_draw():
    preds, target = BINARY.data(n=30)
    keep = ~torch.isin(torch.arange(30), torch.tensor([2, 5, 11]))
    given = {"task": "binary", "n_replicates": 50}
    expected = bootstrap(F.nll, preds[keep], target[keep], **given)
    ignoring = bootstrap(F.nll, preds, target.masked_fill(~keep, -100), ignore_index=-100, **given)
    weighing = bootstrap(F.nll, preds, target, weights=keep.double(), **given)
    for found in (ignoring, weighing):
        close(found.replicates, expected.replicates)
    weights = BINARY.weights(30)
    found = bootstrap(F.brier_score, preds, target, weights=weights, **given)
    close(found.replicates, F.brier_score(preds, target, task="binary", weights=weights * counts_of(50, 30)))
    nothing = (preds, target, torch.zeros(30)), (preds[:0], target[:0], None)
    for preds, target, weights in nothing:
        found = bootstrap(F.nll, preds, target, weights=weights, **given)
        assert found.low.isnan()
        assert found.value.isnan()


def test_batch_elements_and_labels_share_their_draws():
    case = next(case for case in CASES if case.name == "nll-per-label")
    preds, target = case.data(n=30, lead=(2,))
    draw = partial(bootstrap, F.nll, task="multilabel", n_replicates=40)
    found = draw(preds, target, average=None, batch_dims=1)
    assert found.replicates.shape == (40, 2, 4)
    close(found.replicates[:, 1], draw(preds[1], target[1], average=None).replicates)
    close(draw(preds.mT, target.mT, class_axis=-2, batch_dims=1).replicates, found.replicates.mean(-1))


def test_groups_are_resampled_whole_and_stay_in_one_fold():
    preds, target = BINARY.data(n=60)
    groups = torch.arange(60) % 12 * 10 - 20
    weights = counts_of(40, 12)[:, torch.arange(60) % 12]
    given = {"task": "binary", "n_replicates": 40, "groups": groups}

    def no_signature(_):
        raise ValueError("no signature found")

    Builtin = type("Builtin", (), {"__call__": staticmethod(F.nll), "__signature__": property(no_signature)})
    for metric in (F.nll, Builtin()):  # functions that accept no groups
        found = bootstrap(metric, preds, target, **given)
        close(found.replicates, F.nll(preds, target, task="binary", weights=weights))
    found = bootstrap(tc.relative_calibration_loss, preds, target, **given)
    close(found.replicates, tc.relative_calibration_loss(preds, target, task="binary", weights=weights, groups=groups))
    assert not torch.allclose(
        found.replicates, tc.relative_calibration_loss(preds, target, task="binary", weights=weights)
    )


def test_named_tuples_give_an_interval_for_each_field():
    preds, target = BINARY.data(n=60)
    draw = partial(bootstrap, preds=preds, target=target, task="binary", n_replicates=40)
    found = draw(F.corp)
    assert isinstance(found, F.CORPDecomposition)
    close(found.mcb.replicates, draw(lambda *a, **options: F.corp(*a, **options).mcb).replicates)


@pytest.mark.parametrize(
    "calibrator", [tc.AffineScaling(), tc.TemperatureScaling(), tc.HistogramBinning(5), tc.IsotonicCalibration()]
)
@pytest.mark.parametrize("task", ["binary", "multilabel"])
def test_replicates_of_calibration_loss_equal_resampled_data_with_copies_in_one_fold(calibrator, task):
    case = next(case for case in CASES if case.name == f"nll-{task}-logits")
    preds, target = case.data(n=40)
    folds = torch.arange(40) % 3
    options = {"task": task, "from_logits": True, "calibrator": calibrator, "score": "brier"}
    found = bootstrap(tc.calibration_loss, preds, target, n_replicates=39, folds=folds, **options)
    for r, times in enumerate(counts_of(39, 40)[:3].long()):
        drawn = [x.repeat_interleave(times, 0) for x in (preds, target, folds)]
        expected = tc.calibration_loss(drawn[0], drawn[1], folds=drawn[2], **options)
        close(found.replicates[r], expected, rtol=1e-8, atol=1e-8)


@pytest.mark.extended
def test_95_percent_intervals_cover_the_truth_in_93_to_97_percent_of_1000_data_sets():
    """Over-confident log-odds: twice the true log-odds."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        logits = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return 2 * logits, (torch.rand(*shape, generator=generator, dtype=torch.float64) < logits.sigmoid()).long()

    truth = F.nll(*drawn(4_000_000), task="binary", from_logits=True)
    found = bootstrap(F.nll, *drawn(1000, 300), task="binary", from_logits=True, n_replicates=199, batch_dims=1)
    covered = (found.low <= truth) & (truth <= found.high)
    assert 0.93 <= float(covered.double().mean()) <= 0.97


def test_interval_ends_are_replicates_at_their_ranks_also_with_infinity_and_nan():
    replicates = torch.arange(1, 1000.0)[torch.randperm(999, generator=torch.Generator().manual_seed(0))]
    found = Interval(torch.tensor(400.0), replicates, 0.95)
    # 25 of 1,000 replicates are at or below the lower end, 25 at or above the upper end
    assert (float(found.low), float(found.high)) == (25, 975)
    assert float(found.bias) == 100
    close(found.standard_error, replicates.std())
    assert "low=25.0" in repr(found)
    least = Interval(torch.tensor(0.0), torch.arange(39.0), 0.95)
    assert (float(least.low), float(least.high)) == (0, 38)
    replicates = torch.arange(1, 40.0).repeat(2, 1).T.contiguous()
    replicates[[3, 7, 12], 0] = torch.inf
    replicates[5, 1] = torch.nan
    found = Interval(torch.zeros(2), replicates, 0.9)
    close(found.low, torch.tensor([2.0, torch.nan]))
    close(found.high, torch.tensor([torch.inf, torch.nan]))
