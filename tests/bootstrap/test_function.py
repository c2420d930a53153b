"""Bootstrap of functions: metrics of the samples drawn, calibration losses, coverage, and what is refused."""

from functools import partial

import pytest
import torch
from cases import CASES
from helpers.bootstrap import BINARY, close, counts_of
from helpers.refusals import assert_refused

import torchcalib as tc
from torchcalib.calibration_loss.losses import both_scores
from torchcalib.predictions import canonical

P, Y = torch.tensor([0.2, 0.7, 0.9, 0.6]), torch.tensor([0, 1, 1, 0])


def test_replicates_of_every_metric_are_the_metric_of_the_samples_drawn(path):
    preds, target = path.data(n=25)
    found = tc.bootstrap(path.function, preds, target, task=path.task, n_replicates=39, seed=1, **path.options)
    close(found.value, path.call(preds, target))
    for r, times in enumerate(counts_of(39, 25, seed=1)[:2].long()):
        drawn = path.call(preds.repeat_interleave(times, 0), target.repeat_interleave(times, 0))
        close(found.replicates[r], drawn)
    assert not bool((found.low > found.high).any())


def test_few_replicates_at_a_time_are_the_same(monkeypatch):
    preds, target = BINARY.data(n=50)
    whole = tc.bootstrap(tc.tce, preds, target, task="binary", n_replicates=45)
    sizes = []
    monkeypatch.setattr(canonical, "_MOST_AT_ONCE", 200)

    def spy(*args, **options):
        if options["weights"] is not None:
            sizes.append(options["weights"].numel())
        return tc.tce(*args, **options)

    pieces = tc.bootstrap(spy, preds, target, task="binary", n_replicates=45)
    assert max(sizes) == 200
    close(pieces.replicates, whole.replicates)
    other = tc.bootstrap(tc.tce, preds, target, task="binary", n_replicates=45, seed=1)
    assert not torch.equal(other.replicates, whole.replicates)


def test_what_is_left_out_is_not_drawn():
    preds, target = BINARY.data(n=30)
    marked = target.clone()
    marked[[2, 5, 11]] = -100
    keep = marked != -100
    expected = tc.bootstrap(tc.nll, preds[keep], target[keep], task="binary", n_replicates=50)
    ignoring = tc.bootstrap(tc.nll, preds, marked, task="binary", n_replicates=50, ignore_index=-100)
    close(ignoring.replicates, expected.replicates)
    weighing = tc.bootstrap(tc.nll, preds, target, task="binary", n_replicates=50, weights=keep.double())
    close(weighing.replicates, expected.replicates)


def test_a_sample_has_its_weight_each_time_it_is_drawn():
    preds, target = BINARY.data(n=30)
    weights = BINARY.weights(30)
    found = tc.bootstrap(tc.brier_score, preds, target, task="binary", n_replicates=40, weights=weights)
    close(found.replicates, tc.brier_score(preds, target, task="binary", weights=weights * counts_of(40, 30)))


def test_series_are_drawn_alike_and_labels_together():
    case = next(case for case in CASES if case.name == "nll-per-label")
    preds, target = case.data(n=30, lead=(2,))
    found = tc.bootstrap(tc.nll, preds, target, task="multilabel", n_replicates=40, average=None)
    alone = tc.bootstrap(tc.nll, preds[1], target[1], task="multilabel", n_replicates=40, average=None)
    assert found.replicates.shape == (40, 2, 4)
    close(found.replicates[:, 1], alone.replicates)
    twice = tc.bootstrap(
        tc.nll, preds.transpose(-1, -2), target.transpose(-1, -2), task="multilabel", n_replicates=40, class_axis=-2
    )
    close(twice.replicates, found.replicates.mean(-1))


def test_groups_are_drawn_whole():
    preds, target = BINARY.data(n=30)
    groups = torch.arange(30) % 7 * 10 - 20
    seen = []

    def spy(*args, **options):
        seen.append(options["weights"])
        return tc.nll(*args, **options)

    found = tc.bootstrap(spy, preds, target, task="binary", n_replicates=40, groups=groups)
    close(seen[-1], counts_of(40, 7)[:, torch.arange(30) % 7])
    close(found.replicates, tc.nll(preds, target, task="binary", weights=seen[-1]))


def test_named_tuples_are_intervals_of_each_part():
    preds, target = BINARY.data(n=60)
    found = tc.bootstrap(tc.corp, preds, target, task="binary", n_replicates=40)
    assert isinstance(found, tc.CORPDecomposition)
    alone = tc.bootstrap(
        lambda *a, **options: tc.corp(*a, **options).mcb, preds, target, task="binary", n_replicates=40
    )
    close(found.mcb.replicates, alone.replicates)


def test_no_data_is_nan():
    preds, target = BINARY.data(n=4)
    for weights in (torch.zeros(4), None):
        n = 4 if weights is not None else 0
        found = tc.bootstrap(tc.nll, preds[:n], target[:n], task="binary", n_replicates=40, weights=weights)
        assert found.low.isnan()
        assert found.value.isnan()


@pytest.mark.parametrize("calibrator", [tc.DPCalibration(), tc.Temperature(), tc.HistogramBinning(5), tc.Isotonic()])
@pytest.mark.parametrize("task", ["binary", "multilabel"])
def test_calibration_loss_of_replicates_is_that_of_the_samples_drawn_copies_in_one_fold(calibrator, task):
    case = next(case for case in CASES if case.name == f"nll-{task}-logits")
    preds, target = case.data(n=40)
    folds = torch.arange(40) % 3
    options = {"task": task, "from_logits": True, "calibrator": calibrator, "score": "brier"}
    found = tc.bootstrap(tc.calibration_loss, preds, target, n_replicates=39, folds=folds, **options)
    for r, times in enumerate(counts_of(39, 40)[:3].long()):
        drawn = [x.repeat_interleave(times, 0) for x in (preds, target, folds)]
        expected = tc.calibration_loss(drawn[0], drawn[1], folds=drawn[2], **options)
        close(found.replicates[r], expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("class_axis", [-1, 0])
def test_a_few_replicates_of_a_calibration_loss_at_a_time_are_the_same(monkeypatch, class_axis):
    case = next(case for case in CASES if case.name == "nll-multiclass-logits")
    preds, target = case.data(n=60)
    preds = preds if class_axis == -1 else preds.T
    options = {"task": "multiclass", "from_logits": True, "class_axis": class_axis, "n_replicates": 40}
    whole = tc.bootstrap(partial(tc.rcl, score="brier"), preds, target, **options)
    monkeypatch.setattr(canonical, "_MOST_AT_ONCE", 60 * 4 * 6 * 3)
    pieces = tc.bootstrap(partial(tc.rcl, score="brier"), preds, target, **options)
    close(pieces.replicates, whole.replicates, rtol=1e-8, atol=1e-8)


def test_groups_share_a_fold_in_every_replicate(monkeypatch):
    preds, target = BINARY.data(n=60)
    groups = torch.arange(60) % 12
    found = tc.bootstrap(tc.rcl, preds, target, task="binary", n_replicates=39, groups=groups)
    weights = counts_of(39, 12)[:, groups]
    close(found.replicates, tc.rcl(preds, target, task="binary", weights=weights, groups=groups))
    apart = tc.rcl(preds, target, task="binary", weights=weights)
    assert not torch.allclose(found.replicates, apart)


def test_a_calibrator_is_fitted_anew_in_every_replicate():
    preds, target = BINARY.data(n=60)
    weights = counts_of(40, 60)
    fixed = tc.calibrated(preds, target, task="binary", train_on_test=True)
    found = tc.bootstrap(tc.rcl, preds, target, task="binary", n_replicates=40, train_on_test=True)
    raw, after = both_scores(
        preds, target, "binary", "nll", tc.DPCalibration(), {"train_on_test": True, "weights": weights}
    )
    close(found.replicates, 100 * (1 - after / raw))
    assert bool((after <= tc.nll(fixed, target, task="binary", weights=weights) + 1e-9).all())  # each its own best


@pytest.mark.parametrize("score", [tc.nll, tc.brier_score, tc.ecd], ids=lambda f: f.__name__)
def test_95_percent_intervals_cover_the_truth_in_93_to_97_percent_of_1000_data_sets(score):
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        """Over-confident log-odds: the evidence is half of what is claimed."""
        logits = torch.randn(*shape, generator=generator, dtype=torch.float64)
        target = torch.rand(*shape, generator=generator, dtype=torch.float64) < logits.sigmoid()
        return 2 * logits, target.long()

    truth = score(*drawn(4_000_000), task="binary", from_logits=True)
    preds, target = drawn(1000, 300)
    found = tc.bootstrap(score, preds, target, task="binary", from_logits=True, n_replicates=199)
    covered = (found.low <= truth) & (truth <= found.high)
    assert 0.93 <= float(covered.double().mean()) <= 0.97


def test_the_bias_of_ece_is_told_where_predictions_are_calibrated():
    """A calibrated model's ECE is 0, and what a sample shows of it is chance: the bias that is told is about that."""
    generator = torch.Generator().manual_seed(0)
    preds = torch.rand(200, 500, generator=generator, dtype=torch.float64)
    target = (torch.rand(200, 500, generator=generator) < preds).long()
    found = tc.bootstrap(tc.ece, preds, target, task="binary", n_replicates=99)
    assert float(found.value.mean()) > 0.03
    assert 0.3 < float(found.bias.mean() / found.value.mean()) < 1
    assert float((found.low > 0).double().mean()) == 1  # no interval covers the truth, which is why the bias is told


def test_a_metric_without_a_signature_is_given_no_groups():
    def no_signature(_):
        raise ValueError("no signature found")

    Builtin = type("Builtin", (), {"__call__": staticmethod(tc.nll), "__signature__": property(no_signature)})
    groups = torch.tensor([0, 0, 1, 1])
    options = {"task": "binary", "n_replicates": 40, "groups": groups}
    close(tc.bootstrap(Builtin(), P, Y, **options).replicates, tc.bootstrap(tc.nll, P, Y, **options).replicates)


BAD_INPUT = [
    ({"metric": "ece"}, TypeError, "`metric` must be a function such as torchcalib.ece, got 'ece'"),
    ({"metric": lambda *a, **k: 0.5}, TypeError, "`metric` must return a tensor"),
    ({"metric": lambda *a, **k: torch.zeros(())}, ValueError, "`metric` must return (40,) for weights of 40"),
    ({"metric": lambda *a, **k: torch.zeros((), dtype=torch.int64)}, TypeError, "must return floating values, got"),
    ({"n_replicates": 0}, ValueError, "`n_replicates` must be"),
    ({"n_replicates": 38}, ValueError, "`n_replicates` must be at least 39 for level=0.95, got 38"),
    ({"metric": pytest.fail, "level": 0.99}, ValueError, "`n_replicates` must be at least 199 for level=0.99"),
    ({"level": "95 %"}, TypeError, "`level` must be a number, got '95 %'. A 95 % interval has level 0.95"),
    ({"level": True}, TypeError, "`level` must be a number, got True"),
    ({"level": 95}, ValueError, "`level` must be between 0 and 1, got 95. A 95 % interval has level 0.95"),
    ({"level": 1.0}, ValueError, "`level` must be between 0 and 1"),
    ({"seed": 0.5}, TypeError, "`seed` must be an int, got 0.5"),
    ({"seed": True}, TypeError, "`seed` must be an int, got True"),
    ({"seed": 2**64}, ValueError, "`seed` must fit in 64 bits"),
    ({"groups": torch.zeros(4)}, TypeError, "`groups` must be a tensor of integers, got dtype torch.float32"),
    ({"groups": [1, 2, 3, 4]}, TypeError, "`groups` must be a tensor of integers, got list"),
    ({"groups": torch.zeros(3, dtype=torch.int64)}, ValueError, "`groups` must have one number per sample, shape"),
    ({"task": "regression"}, ValueError, "`task` must be"),
    ({"weights": torch.ones(40, 4)}, ValueError, "`weights` must have one value per sample, got shape (40, 4)"),
    ({"weights": torch.ones(3)}, ValueError, "`weights` must have one value per sample, shape (4,)"),
    ({"bins": 3}, TypeError, "`bins`"),
    (
        {"metric": tc.rcl, "weights": None, "calibration": (P, Y, torch.ones(3, 4))},
        ValueError,
        "`calibration` must have one weight per sample, got (3,) of them",
    ),
]


def test_bad_input_is_refused_before_anything_is_computed():
    given = {"metric": tc.nll, "preds": P, "target": Y, "task": "binary", "n_replicates": 40}
    assert_refused(
        (change, partial(tc.bootstrap, **{**given, **change}), error, [message]) for change, error, message in BAD_INPUT
    )
