"""Tables for plots and pages: equal-width bins, and blocks of a sorted sample with rejected samples."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import torch

from torchcalib import plots
from torchcalib.functional import BinTable, TCETable, calibration_curve
from torchcalib.special import binomial_test


def bins_of(probs, outcomes, n_bins=5, **options) -> BinTable:
    probs = torch.tensor(probs, dtype=torch.float64)
    return calibration_curve(probs, torch.tensor(outcomes, dtype=torch.int64), task="binary", n_bins=n_bins, **options)


@cache
def mixed_bins() -> BinTable:
    """Return bins of 1, 0, 3, 2 and 4 samples: above the diagonal, empty, below, on and below the diagonal."""
    probs = [0.1, 0.45, 0.5, 0.55, 0.75, 0.75, 0.9, 0.9, 0.95, 0.95]
    table = bins_of(probs, [1, 0, 0, 1, 1, 1, 1, 0, 1, 1])
    gap, frequency = table.gap.clone(), table.frequency.clone()
    gap[3], frequency[3] = 0.0, table.confidence[3]
    return replace(table, frequency=frequency, gap=gap)


def blocks_of(probs, outcomes, sizes, edges=None, rejected=None) -> TCETable:
    """Compute the table for blocks of the sorted sample with loops. A size of 0 is an empty bin."""
    probs, order = torch.as_tensor(probs, dtype=torch.float64).sort(stable=True)
    outcomes = torch.as_tensor(outcomes)[order]
    held = [(p, y) for p, y in zip(probs.split(sizes), outcomes.split(sizes), strict=True)]
    if edges is None:
        edges = [0, *((a[-1] + b[0]) / 2 for (a, _), (b, _) in pairwise(held)), 1]
    edges = torch.tensor(edges, dtype=torch.float64)
    n = torch.tensor(sizes, dtype=torch.float64)
    confidence = torch.stack([p.mean() for p, _ in held])
    frequency = torch.stack([y.double().mean() for _, y in held])
    if rejected is None:
        rejected = [(binomial_test(y.sum(), len(y), p) <= 0.05).sum() if len(y) else 0 for p, y in held]
    nan = torch.full((33,), torch.nan, dtype=torch.float64)
    ranks = torch.linspace(0, 1, 33, dtype=torch.float64)
    quantiles = [p[(ranks * (len(p) - 1)).round().long()] if len(p) else nan for p, _ in held]
    rejected = torch.tensor(rejected, dtype=torch.float64)
    gap, none = (frequency - confidence).nan_to_num(), torch.full_like(n, torch.nan)
    return TCETable(
        lower=edges[:-1], upper=edges[1:], n=n, effective_n=n, share=n / n.sum(), confidence=confidence,
        frequency=frequency, gap=gap, ecd=none, band_low=none, band_high=none, rejected=rejected,
        quantiles=torch.stack(quantiles),
    )  # fmt: skip


def simulated_blocks(sizes, spread=2.0) -> TCETable:
    """Return blocks for an over-confident model: the log-odds of the outcomes are the logits divided by 1.6."""
    generator = torch.Generator().manual_seed(0)
    logits = spread * torch.randn(sum(sizes), generator=generator, dtype=torch.float64)
    outcomes = torch.rand(logits.shape, generator=generator, dtype=torch.float64) < (logits / 1.6).sigmoid()
    return blocks_of(logits.sigmoid(), outcomes.long(), sizes)


@cache
def small_blocks() -> TCETable:
    """Return blocks of 4, 0, 3 and 5 samples. All scores of the last block are equal."""
    probs = [0.05, 0.1, 0.15, 0.2, 0.5, 0.55, 0.6, *[0.9] * 5]
    outcomes = [0, 0, 0, 1, 0, 1, 1, 1, 1, 1, 0, 1]
    return blocks_of(probs, outcomes, [4, 0, 3, 5], [0, 0.25, 0.4, 0.75, 1], [1, 0, 0, 5])


@cache
def no_blocks() -> TCETable:
    return blocks_of([], torch.zeros(0, dtype=torch.int64), [0], [0, 1])


@cache
def batch_of_blocks() -> TCETable:
    """Return two batch elements. The second has one bin, and empty bins as padding."""
    one, other = small_blocks(), simulated_blocks([60])
    padding = [1.0, 1.0, 0.0, 0.0, 0.0, torch.nan, torch.nan, 0.0, *[torch.nan] * 3, 0.0, torch.nan]
    columns = []
    for name, fill in zip(one.to_dict(), padding, strict=True):
        full, short_one = getattr(one, name), getattr(other, name)
        columns.append(torch.stack([full, torch.cat([short_one, torch.full_like(full[1:], fill)])]))
    return TCETable(*columns)


def texts(ax) -> list[str]:
    return [text.get_text() for text in ax.texts]


def in_logits(table, ax=None, **options):
    return plots.tce_diagram(table, ax=ax, logit=True, **options)


def two_binnings(table, ax=None, **options):
    return plots.bin_comparison({"PAVA": table, "equal width": table}, ax, **options)
