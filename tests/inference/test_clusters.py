"""Clusters of dependent rows: sums, random signs, design effect and intervals, against loops."""

import math

import numpy as np
import pytest
import torch
from helpers.reports import QUICK
from helpers.samples import updated
from scipy import stats

import torchcalib as tc
from torchcalib.core import clusters as core
from torchcalib.core.clusters import MAX_CLUSTERS, cluster_numbers, determine_label, in_clusters
from torchcalib.core.inputs import read_input
from torchcalib.core.ranked_bins import Binning
from torchcalib.functional.logistic import score_test_of_clusters
from torchcalib.inference import Interval, bootstrap, calibration_test
from torchcalib.inference.clusters import ClusteredMean, sign_p_value
from torchcalib.inference.simulation import OrderedSample
from torchcalib.inference.testing import _p_value

F64 = torch.float64
N_CLUSTERS, ROWS = 40, 25


def copies(seed=2):
    """Return 40 calibrated rows, each of which occurs 25 times, and their clusters."""
    g = torch.Generator().manual_seed(seed)
    p = torch.rand(N_CLUSTERS, generator=g, dtype=F64)
    y = torch.bernoulli(p, generator=g).long()
    return (x.repeat_interleave(ROWS) for x in (p, y, torch.arange(N_CLUSTERS)))


def dependent(seed=0, rho=0.5, n_clusters=N_CLUSTERS, rows=ROWS):
    """Return calibrated confidences, outcomes with a Gaussian copula, and clusters of shape `(n_clusters * rows,)`."""
    g = torch.Generator().manual_seed(seed)
    p = torch.rand(n_clusters, rows, generator=g, dtype=F64)
    common, own = torch.randn(n_clusters, 1, generator=g, dtype=F64), torch.randn(n_clusters, rows, generator=g)
    y = (torch.special.ndtr(math.sqrt(rho) * common + math.sqrt(1 - rho) * own) < p).long()
    clusters = torch.arange(n_clusters).unsqueeze(-1).expand(-1, rows)
    return p.flatten(), y.flatten(), clusters.flatten()


ERRORS = [tc.ECE, tc.ESCE, tc.RMSCE, tc.MCE, tc.ACE, tc.KS, tc.ATB, tc.CORP, tc.TCE, tc.SmECE, tc.ICI, tc.Spiegelhalter]
ERRORS += [tc.Cox]


@pytest.mark.parametrize("test", ["binomial", "t"])
def test_sums_of_outcomes_below_0_or_above_n_are_tested_as_the_nearest_counts(test):
    p = torch.cat((torch.logspace(-60, -1, 50, dtype=F64), torch.linspace(0.51, 0.99, 50, dtype=F64)))
    sample = OrderedSample(p, torch.zeros_like(p), torch.full_like(p, 2), False)

    def tested(*sums):
        """Return the rejections in two bins with these sums, as random signs of clusters give them."""
        outcomes = torch.zeros(1, 100, dtype=F64)
        outcomes[0, [0, 99]] = torch.tensor(sums, dtype=F64)
        return Binning("equal_width", 2).from_sample(sample.with_outcomes(outcomes)).rejected(0.05, test)

    assert torch.equal(tested(-3.0, 102.6), tested(0.0, 100.0))
    assert torch.equal(tested(1.7, 60.2), tested(2.0, 60.0))


def test_calibrated_rare_events_of_clusters_have_few_significant_log_scores():
    """Half of the random signs of a rare event give a sum below 0, whose log-likelihood is that of no event."""
    g = torch.Generator().manual_seed(0)
    p = torch.sigmoid(torch.randn(20, 400, generator=g, dtype=F64) - 3)
    y = (torch.rand(20, 400, generator=g, dtype=F64) < p).long()
    metric, how = tc.CORP(task="binary", score="nll"), {"clusters": torch.arange(400) // 4, "n_replicates": 99}
    found = [calibration_test(metric, *rows, **how) for rows in zip(p, y, strict=True)]
    assert sum(float(each.p_value) <= 0.05 for each in found) <= 4  # P = 0.003 for a binomial count of 20
    assert all(float(each.noise_floor) > 0 for each in found)


def test_a_p_value_is_unknown_if_a_replicate_is():
    observed, replicates = torch.tensor([0.5, 0.5, math.nan]), torch.tensor([[0.1, 0.1, 0.1], [0.9, math.nan, 0.9]])
    p_value, _ = _p_value(observed, replicates)
    assert p_value.tolist() == pytest.approx([2 / 3, math.nan, math.nan], nan_ok=True)


@pytest.mark.parametrize("cls", ERRORS)
def test_copies_of_rows_are_significant_only_if_they_are_treated_as_independent(cls):
    p, y, clusters = copies()
    rows = calibration_test(cls(task="binary"), p, y, n_replicates=99)
    found = calibration_test(cls(task="binary"), p, y, clusters=clusters, n_replicates=99)
    assert 5 * float(rows.p_value) < float(found.p_value)
    assert float(found.p_value) > 0.2
    assert float(found.statistic) == pytest.approx(float(rows.statistic), rel=1e-9)
    single = calibration_test(cls(task="binary"), p[::ROWS], y[::ROWS], n_replicates=99)
    assert found.n_clusters == N_CLUSTERS
    assert 0.6 * ROWS < float(found.design_effect) < 1.5 * ROWS
    if cls not in (tc.Cox, tc.Spiegelhalter, tc.TCE):  # their statistics grow with the number of rows
        assert float(found.noise_floor) == pytest.approx(float(single.noise_floor), rel=0.35)
    assert found.n_merged == N_CLUSTERS
    assert float(found.effective_clusters) == pytest.approx(N_CLUSTERS, rel=1e-9)  # equal sizes
    assert "40 independent clusters, effective number 40, design effect" in str(found)
    assert rows.design_effect is None


def test_the_p_value_counts_the_sign_flips_of_clusters_that_give_at_least_the_error():
    """All 2^7 flips of 7 clusters in a loop. Random signs must agree within Monte-Carlo error."""
    p, y, clusters = dependent(3, rho=0.3, n_clusters=7, rows=40)
    bins = np.minimum((p.numpy() * 5).astype(int), 4)
    residual = np.zeros((7, 5))
    np.add.at(residual, (clusters.numpy(), bins), (y - p).numpy())
    observed = np.abs(residual.sum(0)).sum()
    signs = 2 * ((np.arange(2**7)[:, None] >> np.arange(7)) & 1) - 1
    exact = (np.abs(signs @ residual).sum(1) >= observed - 1e-9).mean()
    metric = tc.ECE(task="binary", n_bins=5)
    found = calibration_test(metric, p, y, clusters=clusters, n_replicates=9_999)
    of_rows = calibration_test(metric, p, y, n_replicates=9_999)
    expected = max(exact, float(of_rows.p_value))
    assert float(found.p_value) == pytest.approx(expected, abs=4 * math.sqrt(exact * (1 - exact) / 9_999) + 1e-4)


def test_clusters_of_one_row_have_a_design_effect_near_1_and_the_noise_floor_of_rows():
    g = torch.Generator().manual_seed(0)
    p = torch.rand(1_000, generator=g, dtype=F64)
    y = torch.bernoulli(p, generator=g).long()
    rows = calibration_test(tc.ECE(task="binary"), p, y)
    found = calibration_test(tc.ECE(task="binary"), p, y, clusters=torch.arange(1_000))
    assert float(found.design_effect) == pytest.approx(1, abs=0.15)
    assert float(found.noise_floor) == pytest.approx(float(rows.noise_floor), rel=0.05)
    assert float(found.p_value) >= float(rows.p_value)


SIZES = (1, 2, 2, 5, 9, 24)


def mean_by_matrices(values):
    """Return the CR2 variance of the sum of values in clusters of `SIZES`, its degrees of freedom, and G*, by matrices.

    Regression on a constant, X = 1, with working covariance I for the adjustment matrices, as in Bell and McCaffrey
    (2002) and Pustejovsky and Tipton (2018); G* = G / (1 + Gamma) of Carter, Schnepel and Steigerwald (2017).
    """
    n, ends = len(values), np.cumsum(SIZES)
    blocks = [np.arange(end - size, end) for size, end in zip(SIZES, ends, strict=True)]
    annihilator = np.eye(n) - np.ones((n, n)) / n  # I - H
    residuals = annihilator @ values
    vectors, variance = [], 0.0
    for block in blocks:
        eigenvalues, q = np.linalg.eigh(annihilator[np.ix_(block, block)])
        adjustment = q @ np.diag(eigenvalues**-0.5) @ q.T
        variance += float(np.ones(len(block)) @ adjustment @ residuals[block]) ** 2
        vectors.append(annihilator[block].T @ adjustment @ np.ones(len(block)))
    pairs = sum(size**2 for size in SIZES) / n - 1
    rho = min(1.0, max(0.0, (variance / float(residuals @ residuals) - 1) / pairs))
    covariance = np.zeros((n, n))
    for block in blocks:
        covariance[np.ix_(block, block)] = rho + (1 - rho) * np.eye(len(block))
    products = np.array([[a @ covariance @ b for b in vectors] for a in vectors])
    gamma = np.array([covariance[np.ix_(block, block)].sum() for block in blocks])
    effective = len(SIZES) / (1 + ((gamma - gamma.mean()) ** 2).mean() / gamma.mean() ** 2)
    return variance, np.trace(products) ** 2 / (products**2).sum(), effective, rho


@pytest.mark.parametrize("seed", range(4))
def test_corrections_for_few_clusters_equal_those_of_matrices(seed):
    g = torch.Generator().manual_seed(seed)
    cluster = torch.repeat_interleave(torch.arange(len(SIZES)), torch.tensor(SIZES))
    values = torch.randn(len(cluster), generator=g, dtype=F64)
    values += seed * torch.randn(len(SIZES), generator=g, dtype=F64)[cluster]  # seed 0: no common part
    residual = torch.zeros(len(SIZES), dtype=F64).index_add(0, cluster, values - values.mean())
    independent = (values - values.mean()).square().sum()
    mean = ClusteredMean(torch.tensor(SIZES, dtype=F64), residual, independent, torch.ones((), dtype=F64))
    variance, df, effective, rho = mean_by_matrices(values.numpy())
    assert float(mean.variance) == pytest.approx(variance, rel=1e-9)
    assert float(mean.correlation) == pytest.approx(rho, abs=1e-9)
    assert float(mean.degrees_of_freedom) == pytest.approx(df, rel=1e-9)
    assert float(mean.effective_number) == pytest.approx(effective, rel=1e-9)
    assert float(mean.t_quantile(0.95)) == pytest.approx(stats.t.ppf(0.975, df), rel=1e-6)
    doubled = ClusteredMean(2 * mean.n, 2 * residual, 4 * independent, 2 * mean.unit)  # all rows have weight 2
    assert float(doubled.degrees_of_freedom) == pytest.approx(df, rel=1e-9)


def test_the_design_effect_is_the_corrected_variance_of_the_mean_gap_over_that_of_rows():
    p, y, clusters = dependent(1)
    gap, n = (y - p).numpy(), len(p)
    sums = [gap[clusters.numpy() == k].sum() - ROWS * gap.mean() for k in range(N_CLUSTERS)]
    variance = sum(x**2 for x in sums) / (1 - 1 / N_CLUSTERS) / n**2
    found = calibration_test(tc.ESCE(task="binary", n_bins=50), p, y, clusters=clusters, n_replicates=9)
    assert float(found.design_effect) == pytest.approx(variance / (gap.var() / n), rel=0.02)


def test_the_interval_of_the_signed_error_is_near_the_t_interval_of_clusters():
    p, y, clusters = dependent(2)
    means = (y - p).reshape(N_CLUSTERS, ROWS).mean(1).numpy()  # clusters of equal size
    half = stats.t.ppf(0.975, N_CLUSTERS - 1) * means.std(ddof=1) / math.sqrt(N_CLUSTERS)
    found = calibration_test(tc.ESCE(task="binary"), p, y, clusters=clusters)
    ends = float(found.low), float(found.high)
    assert ends == pytest.approx((means.mean() - half, means.mean() + half), abs=0.1 * half)


@pytest.mark.parametrize("n_clusters", [10, 30, 1_000])
def test_percentiles_of_few_clusters_are_moved_outwards_to_the_t_interval(n_clusters):
    """For a normal mean the bootstrap variance is (n - 1) / n of the unbiased one; the ends must be those of t."""
    z = torch.special.ndtri((torch.arange(99_999, dtype=F64) + 1) / 100_000)
    found = Interval(torch.zeros(()), z * math.sqrt((n_clusters - 1) / n_clusters), 0.95, n_clusters)
    assert float(found.high) == pytest.approx(stats.t.ppf(0.975, n_clusters - 1), rel=5e-3)
    assert float(found.low) == pytest.approx(-float(found.high), rel=1e-9)


@pytest.mark.parametrize("cls", [tc.NLL, tc.ECE])
def test_intervals_of_clusters_are_wider_than_those_of_rows_in_every_path(cls):
    p, y, clusters = copies()
    rows = bootstrap(F_OF[cls], p, y, task="binary", n_replicates=399)
    clustered = updated(tc.Clustered(cls(task="binary")), (p, y), clusters=clusters)
    streamed = tc.Bootstrapped(cls(task="binary"), n_replicates=399)
    for part in torch.randperm(len(p), generator=torch.Generator().manual_seed(1)).chunk(3):
        streamed.update(p[part], y[part], clusters=clusters[part])
    grouped = bootstrap(F_OF[cls], p, y, task="binary", n_replicates=399, groups=clusters)
    widths = [float(x.high - x.low) for x in (clustered.interval(n_replicates=399), streamed.interval(), grouped)]
    assert min(widths) > 3 * float(rows.high - rows.low)  # sqrt(25) times without bias
    assert max(widths) < 1.35 * min(widths)
    assert streamed.interval().n_clusters == pytest.approx(N_CLUSTERS, rel=0.35)


F_OF = {tc.NLL: tc.functional.nll, tc.ECE: tc.functional.ece}


def test_bootstraps_refuse_batches_and_states_with_and_without_clusters():
    p, y, clusters = dependent()
    with_clusters, without = (
        updated(tc.Bootstrapped(tc.NLL(task="binary")), (p, y), clusters=each) for each in (clusters, None)
    )
    with pytest.raises(ValueError, match="`clusters` must be passed with all batches or with none"):
        with_clusters.update(p, y)
    with pytest.raises(ValueError, match="must have clusters if this metric has clusters"):
        with_clusters.merge_state(without)


def test_hotelling_p_value_equals_the_f_test_and_random_signs_of_one_score():
    scores = torch.randn(25, 2, generator=torch.Generator().manual_seed(0), dtype=F64) + 0.3
    mean, cov = scores.mean(0).numpy(), np.cov(scores.T.numpy())
    t_square = 25 * mean @ np.linalg.solve(cov, mean)
    expected = stats.f.sf(t_square * 23 / (24 * 2), 2, 23)
    assert float(score_test_of_clusters(scores, torch.tensor(25))) == pytest.approx(expected, rel=1e-9)
    residuals = scores[:, 0]
    p_value = float(sign_p_value(residuals, 0, 9_999))
    assert p_value == pytest.approx(stats.ttest_1samp(residuals.numpy(), 0).pvalue, abs=0.02)


def test_small_identifiers_are_not_merged_and_others_are_spread_evenly():
    assert sorted(cluster_numbers(torch.arange(MAX_CLUSTERS), MAX_CLUSTERS).tolist()) == list(range(MAX_CLUSTERS))
    assert len(set((cluster_numbers(torch.arange(60), MAX_CLUSTERS) // 8).tolist())) > 55, "with 128 clusters"
    for step in (1, 10, 46_368, 10**9, -7):  # steps of Fibonacci numbers are the worst for Fibonacci hashing
        counts = torch.bincount(
            cluster_numbers(torch.arange(2_000, 102_400) * step, MAX_CLUSTERS), minlength=MAX_CLUSTERS
        )
        assert counts.min() > 0.5 * counts.double().mean(), step


@pytest.mark.parametrize(("cls", "n"), [(tc.ECE, 957), (tc.KS, 100_000), (tc.ECE, 100_001)])
def test_text_and_integers_count_the_same_distinct_clusters(cls, n):
    numbers = torch.arange(n) * 7919
    p = torch.full((n,), 0.3)
    y = (torch.arange(n) % 10 < 3).long()
    for ids in (numbers, [f"patient {k}" for k in numbers.tolist()]):
        metric = tc.Clustered(cls(task="binary"))
        for rows in (slice(0, 600), slice(300, n)):
            metric.update(p[rows], y[rows], clusters=ids[rows])
        found = metric.test(n_replicates=1)
        assert found.n_clusters == n
        assert found.n_merged <= MAX_CLUSTERS
        shown = "more than 100,000" if n > 100_000 else f"{n:,}"
        merged = "" if found.n_merged == n else f" (merged into {found.n_merged:,})"
        assert f", {shown} independent clusters{merged}, effective number" in str(found)


@pytest.mark.parametrize("cls", [tc.ECE, tc.KS])
def test_clusters_are_counted_up_to_a_limit_without_those_of_weight_zero(cls, monkeypatch):
    p, y, ids = torch.rand(60), torch.arange(60) % 2, torch.arange(60) % 23 - 5
    for limit, expected in ((100, 22), (22, 22), (10, 11)):
        monkeypatch.setattr(core, "MAX_DISTINCT", limit)
        metric = updated(tc.Clustered(cls(task="binary")), (p, y, (ids != 3).long()), clusters=ids)
        assert metric.test(n_replicates=1).n_clusters == expected
        monkeypatch.undo()


def test_distinct_identifiers_on_a_gpu_are_those_on_the_cpu(monkeypatch):
    g = torch.Generator().manual_seed(0)
    for limit in (1_000, 7):
        monkeypatch.setattr(core, "MAX_DISTINCT", limit)
        ids = [torch.randint(-40, 40, (n,), generator=g) for n in (0, 1, 30, 300)]
        parts = [core._distinct_padded(x) for x in ids]
        whole = core._distinct_padded(torch.cat(parts))
        assert torch.equal(whole[: core.number_of(whole)], core.distinct(torch.cat(ids)))
        assert core.number_of(whole) == min(len(torch.unique(torch.cat(ids))), limit + 1)


@pytest.mark.parametrize(
    ("target", "clusters", "expected"),
    [
        ([0, 0, 1, 1, 2, 2] * 4, [0, 0, 1, 1, 2, 2] * 4, True),  # the clusters are the classes
        ([k // 4 % 3 for k in range(60)], [k // 4 for k in range(60)], True),  # several clusters of each class
        ([k // 4 % 3 for k in range(59)] + [0], [k // 4 for k in range(60)], False),  # one exception
        ([1] * 60, [k // 4 for k in range(60)], False),  # one class
        ([k % 3 for k in range(60)], list(range(60)), False),  # one row in each cluster
        ([0, 0, 1, 1], [0, 0, 1, 1], False),  # probability 1/16 by chance
    ],
)
def test_clusters_determine_the_label_if_each_has_one_label_and_not_by_chance(target, clusters, expected):
    target = torch.tensor(target)
    p = read_input("multiclass", torch.full((len(target), 3), 1 / 3), target, {})
    assert determine_label(in_clusters(p, torch.tensor(clusters))) is expected


def test_text_dates_and_integers_name_the_same_clusters_in_every_batch():
    p, y, clusters = dependent()
    names = np.array([f"patient {k}" for k in clusters.tolist()])
    dates = np.datetime64("2020-01-01") + clusters.numpy()
    found = []
    for ids in (names, list(names), names.astype(object), dates):
        metric = tc.Clustered(tc.NLL(task="binary"))
        for rows in torch.arange(len(p)).chunk(3):
            metric.update(p[rows], y[rows], clusters=[ids[k] for k in rows.tolist()])
        found.append(metric.interval(n_replicates=99))
    assert len({float(x.low) for x in found[:3]}) == 1
    for interval in found:
        assert interval.n_clusters == pytest.approx(N_CLUSTERS, rel=0.15), "a few are merged"


def test_axes_after_the_first_share_the_cluster_of_their_item():
    p, y, clusters = dependent()
    shape = (N_CLUSTERS, ROWS)
    by_item = calibration_test(
        tc.ECE(task="binary"), p.reshape(shape), y.reshape(shape), clusters=torch.arange(N_CLUSTERS), n_replicates=99
    )
    by_row = calibration_test(tc.ECE(task="binary"), p, y, clusters=clusters, n_replicates=99)
    assert float(by_item.p_value) == float(by_row.p_value)


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({"task": "multiclass", "num_classes": 3, "mode": "classwise"}, ()),
        ({"task": "multiclass", "num_classes": 3, "mode": "classwise", "average": None}, (3,)),
        ({"task": "multilabel", "num_labels": 3, "average": None}, (3,)),
        ({"task": "multilabel", "num_labels": 3, "batch_shape": (2,)}, (2,)),
    ],
)
@pytest.mark.parametrize("cls", [tc.ECE, tc.KS])
def test_tests_and_intervals_have_the_shape_of_the_value(cls, options, shape):
    g = torch.Generator().manual_seed(0)
    samples = (*options.get("batch_shape", ()), 120)
    preds = torch.rand(*samples, 3, generator=g).softmax(-1)
    is_labels = options["task"] == "multilabel"
    target = torch.randint(0, 2 if is_labels else 3, (*samples, 3) if is_labels else samples, generator=g)
    clusters = (torch.arange(120) // 4).expand(samples)
    metric = updated(tc.Clustered(cls(**options)), (preds, target), clusters=clusters)
    plain = updated(cls(**options), (preds, target))
    assert torch.allclose(metric.compute(), plain.compute(), rtol=1e-9)
    found, interval = metric.test(n_replicates=39), metric.interval(n_replicates=99)
    assert found.p_value.shape == found.design_effect.shape == interval.low.shape == shape
    assert bool((found.p_value > 0).all())
    assert bool((interval.low <= interval.high).all())


def test_the_class_axis_is_inferred_as_without_clusters_and_groups():
    logits, target = torch.randn(4, 3, 6, 5), torch.randint(0, 3, (4, 6, 5))  # images with classes on axis 1
    values = []
    for options in ({}, {"class_axis": 1}):
        given = {"task": "multiclass", "num_classes": 3, "from_logits": True, **options}
        images = tc.Clustered(tc.ECE(**given)), tc.Bootstrapped(tc.NLL(**given), n_replicates=40)
        for metric in images:
            metric.update(logits, target, clusters=torch.arange(4))
        pixels = tc.ByGroup(tc.ECE(**given), num_groups=3)
        pixels.update(logits, target, groups=target)
        report = tc.report(
            logits, target, from_logits=True, groups=target, clusters=torch.arange(4), **QUICK, **options
        )
        values.append([*(metric.compute() for metric in (*images, pixels)), report["ece"]])
    torch.testing.assert_close(*values, rtol=0, atol=0, equal_nan=True)


def test_intervals_of_too_few_clusters_are_missing():
    p, y, clusters = dependent(n_clusters=3)
    metric = updated(tc.Clustered(tc.NLL(task="binary")), (p, y), clusters=clusters)
    assert bool(metric.interval().low.isnan())
    report = tc.report(p, y, clusters=clusters, task="binary", with_calibration=False)
    assert report.lines[1].interval is None
    assert any("there are too few clusters" in note for note in report.notes)
    single = tc.report(p, y, clusters=0 * clusters, task="binary", with_calibration=False)
    assert "All rows are in one cluster" in single.notes[0]


def test_empty_labels_do_not_widen_the_intervals_of_other_labels():
    p, y, clusters = dependent()
    both = torch.stack((y, torch.full_like(y, -1)), -1)
    options = {"task": "multilabel", "num_labels": 2, "average": None, "ignore_index": -1}
    metric = updated(tc.Clustered(tc.NLL(**options)), (torch.stack((p, p), -1), both), clusters=clusters)
    alone = updated(tc.Clustered(tc.NLL(task="binary")), (p, y), clusters=clusters)
    assert metric.interval().n_clusters == alone.interval().n_clusters


def test_signed_errors_of_exclusive_classes_have_no_design_effect():
    p, y, clusters = dependent()
    metric = tc.ESCE(task="multiclass", num_classes=2, mode="classwise")
    found = calibration_test(metric, torch.stack((1 - p, p), -1), y, clusters=clusters, n_replicates=9)
    assert float(found.p_value) == 1
    assert "design effect" not in str(found)


@pytest.mark.long
@pytest.mark.parametrize(("n_clusters", "rows"), [(30, 10), (30, 100), (300, 10)])
@pytest.mark.parametrize("rho", [0, 0.1, 0.5])
@pytest.mark.parametrize("cls", [tc.ECE, tc.KS, tc.ESCE])
def test_p_values_of_calibrated_models_are_valid(cls, n_clusters, rows, rho):
    """Shares of 1,000 p-values at or below a level exceed it by at most 3 standard errors, or by half of it."""
    p_values = []
    for seed in range(1_000):
        p, y, clusters = dependent(seed, rho, n_clusters, rows)
        p_values.append(float(calibration_test(cls(task="binary"), p, y, clusters=clusters, n_replicates=199).p_value))
    for level in (0.01, 0.05, 0.1):
        share = np.mean(np.array(p_values) <= level + 1e-9)
        assert share <= level + max(3 * math.sqrt(level * (1 - level) / 1_000), level / 2), (level, share)
