"""Replicate weights `(R, N)`: sums for each replicate, and metrics that process a few replicates at a time."""

import math
from functools import partial
from itertools import product
from typing import get_args

import pytest
import torch
from cases import CASES
from helpers.bootstrap import BINARY, counts_of
from helpers.compare import close

import torchcalib.functional as F
from torchcalib.calibration import AffineScaling, score_divergence
from torchcalib.core import predictions
from torchcalib.functional import decision
from torchcalib.inference.resampling import Law, Weights
from torchcalib.ops.counter_rng import multinomial_counts
from torchcalib.ops.segments import bin_sums_of_replicates


@pytest.mark.parametrize("law", get_args(Law))
def test_weights_depend_on_the_seed_the_replicate_and_the_unit_only(law, monkeypatch):
    units = torch.arange(200)
    whole = Weights(3, units, law).in_replicates(torch.arange(500))
    mean, variance = (0, 1) if law == "sign" else (1, 1)
    assert float(whole.mean()) == pytest.approx(mean, abs=4 / math.sqrt(whole.numel()))
    assert float(whole.var()) == pytest.approx(variance, abs=0.03)
    assert set(whole.unique().tolist()) == {-1, 1} if law == "sign" else bool((whole >= 0).all())
    if law == "multinomial":  # as many draws as units
        assert whole.sum(-1).unique().tolist() == [200]
    else:
        some = torch.tensor([7, 3, 150])
        close(Weights(3, units[some], law).in_replicates(torch.arange(500)), whole[:, some])
    close(Weights(3, units, law, first=20).in_replicates(torch.arange(80)), whole[20:100])
    assert not torch.equal(Weights(4, units, law).in_replicates(torch.arange(500)), whole)
    monkeypatch.setattr(predictions, "_MAX_AT_ONCE", 7 * 200)
    chunks = list(Weights(3, units, law).chunks(500, 200))
    assert max(map(len, chunks)) == 7
    close(torch.cat(chunks), whole)


def test_absent_entries_have_weight_0_and_a_group_has_one_weight():
    present = torch.tensor([True, False, True, True, False, True])
    plain = Weights(0, torch.arange(4), "multinomial").in_replicates(torch.arange(50))
    alone = Weights.with_replacement(0, present).in_replicates(torch.arange(50))
    close(alone[:, present], plain)
    assert not alone[:, ~present].any()
    groups = torch.tensor([9, 9, -2, 5, 5, 9])
    together = Weights.with_replacement(0, present, groups).in_replicates(torch.arange(50))
    close(together[:, present], multinomial_counts(0, torch.arange(50), 3, torch.float64)[:, [2, 0, 1, 2]])
    assert not together[:, ~present].any()
    assert not Weights.with_replacement(0, ~present & present, groups).in_replicates(torch.arange(3)).any(), "no entry"


@pytest.mark.parametrize("n_bins", [3, 200])
def test_sums_of_replicates_equal_a_loop_also_with_infinite_values(n_bins):
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(0, n_bins, (2, 30), generator=generator)
    values = torch.randn(2, 30, generator=generator, dtype=torch.float64)
    values[0, 3], values[1, 5] = torch.inf, -torch.inf
    weights = torch.randint(0, 3, (4, 1, 30), generator=generator).double()
    weights[1, 0, 3] = 0
    columns = (torch.ones_like(values), values)
    found = bin_sums_of_replicates(index, columns, weights, n_bins)
    assert found.shape == (4, 2, 2, n_bins)
    expected = torch.zeros_like(found)
    for r, i, k in product(range(4), range(2), range(30)):
        if weights[r, 0, k]:
            expected[r, i, :, index[i, k]] += weights[r, 0, k] * torch.stack([column[i, k] for column in columns])
    close(found, expected)


def test_few_replicates_equal_the_first_of_many():
    preds, target = BINARY.data(n=60)
    weights = counts_of(40, 60)
    whole = F.ece(preds, target, task="binary", weights=weights)
    for n_ways in (1, 3, 15, 16):
        close(F.ece(preds, target, task="binary", weights=weights[:n_ways]), whole[:n_ways])


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (partial(F.optimal_threshold_cost, average="macro"), {"task": "multilabel"}),
        (partial(F.optimal_threshold_cost, average=None), {"task": "multilabel"}),
        (partial(score_divergence, score="brier", n_repeats=1), {"task": "binary"}),
        (partial(score_divergence, score=F.nll, n_repeats=1), {"task": "binary"}),
    ],
)
def test_few_replicates_are_processed_at_a_time(function, options, monkeypatch):
    case = next(case for case in CASES if case.name == "nll-per-label") if options["task"] == "multilabel" else BINARY
    preds, target = case.data(n=60)
    weights = 1 + counts_of(5, 60)
    call = partial(function, preds, target, **options)
    expected = [call(weights=w) for w in weights]
    sizes, in_order, fit_to = [], decision._sorted_predictions, AffineScaling.fit_to
    monkeypatch.setattr(
        decision, "_sorted_predictions", lambda p, priors: sizes.append(len(p.weights)) or in_order(p, priors)
    )
    monkeypatch.setattr(
        AffineScaling, "fit_to", lambda self, p, w=None: sizes.append(len(p.weights)) or fit_to(self, p, w)
    )
    monkeypatch.setattr(predictions, "_MAX_AT_ONCE", 60 * 2 * (4 if case is not BINARY else 6))
    found = call(weights=weights)
    assert sizes == [2, 2, 1]
    parts = [found] if torch.is_tensor(found) else found
    wanted = [expected] if torch.is_tensor(found) else zip(*expected, strict=True)
    for a, b in zip(parts, wanted, strict=True):
        close(a, torch.stack(list(b)), rtol=1e-8, atol=1e-8)


def test_expected_cost_accepts_replicate_weights_and_rejects_bad_decisions():
    decisions, target, cost = torch.tensor([0, 1, 1, 5]), torch.tensor([0, 1, 0, 1]), [[0, 1], [1, 0]]
    weights = torch.tensor([[1.0, 2, 1, 0], [0, 1, 3, 0]])
    close(F.expected_cost(decisions, target, cost=cost, weights=weights), torch.tensor([1 / 4, 3 / 4]).double())
    weights[1, 3] = 1
    with pytest.raises(ValueError, match=r"`decisions` must be a column of `cost` in \[0, 1\], got 5 \(1 of 4 rows\)"):
        F.expected_cost(decisions, target, cost=cost, weights=weights)
