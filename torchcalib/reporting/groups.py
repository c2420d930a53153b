"""Table of the groups of a report with the largest errors, and gaps of groups for the diagnosis."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchcalib.core.event_sums import EqualWidthBins
from torchcalib.core.sums import BinStats
from torchcalib.inference.testing import CalibrationTest, ErrorTest, run_error_test
from torchcalib.metrics.binned import ECE
from torchcalib.metrics.groups.table import GroupTable, resolved

_WORST = 10  # number of groups in the table of a report
_MIN_VARIANCE = 3.0  # smallest variance of the number of outcomes in a group whose gap is tested
_SMALLEST = 1e-4  # confidences are clipped to [1e-4, 1 - 1e-4] before their log-odds are computed
_REPLICATES, _TOTAL_REPLICATES = 199, 200_000  # maximum numbers of simulated replicates, for one and for all groups


def group_table(names: Sequence[str], bins: BinStats, accumulator: EqualWidthBins) -> GroupTable:
    """Return a table of the groups whose expected calibration error (ECE) most exceeds its noise floor.

    `bins` are those of all groups `(G, ..., B)`, and `accumulator` is that of one group.
    """
    order = sorted(range(len(names)), key=names.__getitem__)  # simulated outcomes depend on the position of a group
    sums = bins.sums[order]
    n_replicates = max(59, min(_REPLICATES, _TOTAL_REPLICATES // max(1, len(names))))
    ece, average = ErrorTest(ECE.from_bins, interval=ECE.interval_kind), accumulator.mode == "classwise"

    def test(group_sums: Tensor, n_replicates: int) -> CalibrationTest:
        return run_error_test(ece, accumulator.wrap(group_sums), average=average, n_replicates=n_replicates)

    found = resolved(test(sums, n_replicates), lambda numbers, n: test(sums[numbers], n), n_replicates)
    n = accumulator.wrap(sums).total.reshape(len(names), -1).amax(-1) if names else sums.new_zeros(0)
    return GroupTable.from_test([names[k] for k in order], n, found, k=_WORST)


def gaps_of_groups(names: Sequence[str], bins: BinStats) -> tuple[list[str], Tensor]:
    """Return the names of large groups, and for each two score statistics in standard errors, `(G, 2)`.

    The first is the mean gap, outcome minus confidence. The second is the sum of gaps times log-odds, the derivative
    of the log-likelihood in the logarithm of a temperature. It is negative if confidences are too close to 0 and 1. A
    group is large if the number of outcomes has a variance of at least 3 under calibration. Both are then approximately
    normal.
    """
    log_odds = bins.confidence.nan_to_num(0.5).clamp(_SMALLEST, 1 - _SMALLEST).logit()

    def of_group(x: Tensor) -> Tensor:
        return x.reshape(len(names), -1).sum(-1)

    def standardised(x: Tensor) -> Tensor:
        return (of_group(x * bins.n * bins.gap) / of_group(x.square() * bins.noise).sqrt()).nan_to_num(0, 0, 0)

    large = of_group(bins.noise) >= _MIN_VARIANCE
    statistics = torch.stack((standardised(torch.ones_like(log_odds)), standardised(log_odds)), -1)
    return [name for name, is_large in zip(names, large.tolist(), strict=True) if is_large], statistics[large]
