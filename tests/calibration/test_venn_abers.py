"""Venn-Abers calibration, compared with isotonic fits to the data with the test sample added."""

import math

import pytest
import torch
from helpers.fits import VA, data, fresh, name, single
from helpers.kernels import NUMBA

from torchcalib.ops.isotonic import augmented_means
from torchcalib.ops.sorting import tie_begins


def refitted(scores, target, weights, x, label):
    """Return the isotonic fit at a test sample that is added with a label (Vovk, Petej, Fedorova 2015, sec. 2).

    The fit at x is the largest of the minima, over b >= x, of the mean label of the scores in [a, b], for a <= x
    (Barlow et al. 1972, Theorem 1.4.4). The minimum and the maximum run over the scores of samples.
    """
    rows = [*zip(scores, target, weights, strict=True), (x, label, 1)]
    ends = sorted({score for score, _, weight in rows if weight})

    def mean(a, b):
        inside = [(y, w) for score, y, w in rows if a <= score <= b]
        return sum(y * w for y, w in inside) / sum(w for _, w in inside)

    return max(min(mean(a, b) for b in ends if b >= x) for a in ends if a <= x)


def sample(seed):
    """Few samples with ties, whole-number weights including 0, and new scores on, between and beyond the samples."""
    g = torch.Generator().manual_seed(seed)
    n, distinct = int(torch.randint(1, 25, (), generator=g)), int(torch.randint(1, 20, (), generator=g))
    scores = torch.randint(0, distinct + 1, (n,), generator=g).double() - 5
    target = (torch.rand(n, generator=g) < torch.rand((), generator=g)).long()
    weights = torch.randint(0, 4, (n,), generator=g)
    weights[0] += 1
    return scores, target, weights, torch.arange(-6, distinct - 2, 0.5, dtype=torch.float64)


@pytest.mark.parametrize("from_logits", [False, True])
def test_interval_equals_refits_with_the_test_sample_added(from_logits):
    """Both sides round one quotient of whole numbers, so they are equal."""
    for seed in range(15):
        scores, target, weights, new = sample(seed)
        scores, new = (scores, new) if from_logits else ((scores + 5) / 32, (new + 6) / 32)
        fitted = fresh(VA).fit(scores, target, task="binary", from_logits=from_logits, weights=weights)
        p0, p1 = fitted.predict_interval(new)
        given = [x[weights > 0].tolist() for x in (scores, target, weights)]
        assert p0.tolist() == [refitted(*given, x, 0) for x in new.tolist()]
        assert p1.tolist() == [refitted(*given, x, 1) for x in new.tolist()]
        expected = (p1 / (1 - p0 + p1)).tolist()  # Vovk, Petej, Fedorova 2015, sec. 4, log loss
        # A logarithm, a difference and a sigmoid round the log-odds, whose size is at most log 100.
        assert fitted.predict_proba(new).tolist() == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize("factor", [1e-9, 0.37, 1e3])
def test_interval_with_fractional_weights_equals_refits(factor):
    for seed in range(8):
        scores, target, weights, new = sample(seed)
        weights = factor * weights
        p0, p1 = fresh(VA).fit(scores, target, task="binary", from_logits=True, weights=weights).predict_interval(new)
        given = [x[weights > 0].tolist() for x in (scores, target, weights)]
        assert p0.tolist() == pytest.approx([refitted(*given, x, 0) for x in new.tolist()], abs=1e-10)
        assert p1.tolist() == pytest.approx([refitted(*given, x, 1) for x in new.tolist()], abs=1e-10)


def test_huge_weights_leave_a_test_sample():
    huge = torch.full((20,), 1e20, dtype=torch.float64)
    scores, target = torch.arange(20.0), torch.arange(20) % 2
    p0, p1 = fresh(VA).fit(scores, target, task="binary", from_logits=True, weights=huge).predict_interval(scores)
    assert bool(((p0 >= 0) & (p0 <= p1 + 1e-9) & (p1 <= 1)).all())


@pytest.mark.parametrize("backend", [*["numba"] * bool(NUMBA), "python"])
def test_all_backends_give_the_same_steps(backend):
    g = torch.Generator().manual_seed(1)
    score = torch.randint(0, 90, (3, 200), generator=g).double().sort().values
    n = torch.randint(1, 5, (3, 200), generator=g)
    positives = (torch.rand(3, 200, generator=g) * (n + 1)).long()
    given = score, tie_begins(score), positives, n, torch.tensor([200, 73, 0])
    assert all(map(torch.equal, augmented_means(*given, backend=backend), augmented_means(*given)))


def test_huge_counts_are_exact():
    """Products of these counts exceed int64: Python integers replace them."""
    half = 2**40
    n, positives = torch.tensor([2 * half, 2 * half]), torch.tensor([half + 1, half])
    score = torch.tensor([0.0, 1.0], dtype=torch.float64)
    knots, lower, upper = augmented_means(score, tie_begins(score), positives, n, torch.tensor(2))
    low, high = (2 * half + 1) / (4 * half + 1), (2 * half + 2) / (4 * half + 1)  # both groups are one block
    assert [x.tolist() for x in (knots, lower, upper)] == [[0, 1], [0, low, low], [high, high, 1]]


def test_infinite_logits_and_probabilities_of_0_and_1_are_scores_like_others():
    scores = torch.tensor([-math.inf, -1.0, 2.0, math.inf, math.inf], dtype=torch.float64)
    target = torch.tensor([0, 1, 0, 1, 1])
    by_logits = fresh(VA).fit(scores, target, task="binary", from_logits=True)
    by_probs = fresh(VA).fit(scores.sigmoid(), target, task="binary", from_logits=False)
    ranks = torch.tensor([0.0, 1, 2, 3, 3], dtype=torch.float64)
    by_ranks = fresh(VA).fit(ranks, target, task="binary", from_logits=True)
    expected = by_ranks.predict_interval(ranks)
    for fitted, preds in ((by_logits, scores), (by_probs, scores.sigmoid())):
        assert all(map(torch.equal, fitted.predict_interval(preds), expected))
    assert by_logits(scores).isfinite().all()


def test_interval_of_classes_is_the_interval_of_each_class_against_the_rest():
    logits, target = data(80, 4)
    fitted = fresh(VA).fit(logits.T, target, task="multiclass", from_logits=True, class_axis=0)
    found = fitted.predict_interval(logits.T)
    for k in range(4):
        one = fresh(VA).fit(logits, target, task="multiclass", from_logits=True, positive_classes=[k])
        for columns, expected in zip(found, one.predict_interval(logits), strict=True):
            assert columns.shape == (4, 80)
            assert torch.equal(columns[k], expected)


def test_separable_data_and_a_single_class_give_probabilities_inside_0_and_1():
    preds = torch.tensor([0.1, 0.2, 0.8, 0.9], dtype=torch.float64)
    separated = fresh(VA).fit(preds, torch.tensor([0, 0, 1, 1]), task="binary")
    assert separated(preds).tolist() == pytest.approx([1 / 4, 1 / 3, 2 / 3, 3 / 4])
    one_class = fresh(VA).fit(preds, torch.zeros(4, dtype=torch.int64), task="binary")
    assert one_class.converged
    assert one_class(preds).tolist() == pytest.approx([1 / 6, 1 / 5, 1 / 4, 1 / 3])


def test_in_words_names_the_steps_and_the_range():
    logits, target = single(40)
    fitted = fresh(VA).fit(logits, target, task="binary", from_logits=True)
    p = fitted.predict_proba(torch.tensor([-1e9, 1e9], dtype=torch.float64))
    words = f"a step function with {len(fitted.knots)} steps, from {p[0]:.3g} to {p[1]:.3g}"
    assert fitted.in_words() == words
    rows, classes = data(40, 3)
    of_rows = fresh(VA).fit(rows, classes)
    assert of_rows.in_words() == "one step function for each of 3 classes against the rest"
    assert name(VA) in repr(of_rows)
