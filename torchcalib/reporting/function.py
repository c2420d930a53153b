"""Make a report with one call."""

from collections.abc import Sequence
from typing import Unpack

from torch import Tensor

from torchcalib.core.arguments import InputOptions, Task
from torchcalib.reporting.building import ReportBuilder
from torchcalib.reporting.data import Report


def report(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    n_bins: int = 15,
    right: bool = False,
    with_calibration: bool = True,
    with_intervals: bool = True,
    groups: Tensor | None = None,
    group_names: Sequence[str] | None = None,
    **options: Unpack[InputOptions],
) -> Report:
    """Compute every score and calibration error of a set of predictions.

    - Scores: accuracy, NLL, Brier, ECD.
    - For every mode, errors over equal-width bins: ECE, ESCE, MCE, RMSCE.
    - Rank-based values for one series of confidences, and for labels: ACE with the same number of bins, TCE with the
      defaults of `torchcalib.functional.tce` (`tests` has its decisions), KS, and the parts of the Brier score of the
      event, MCB - DSC + UNC. For each class of a multi-class task they take too long; use `torchcalib.functional.ace`
      and the others.

    TCE, MCB, DSC and UNC need labels and are omitted for soft targets. All rank-based values need weights that are
    whole numbers. Above 2^24 samples (for labels: samples times labels) they come from a sketch, which is exact for
    float16 and bfloat16 probabilities, and else for data in which every probability has moved by less than 1 / 2,048 in
    log-odds (more for more than 16 labels, see `settings`); `torchcalib.core.ranked.LogitCells` gives the bounds.

    `calibration` is the cross-validated gain of a calibration stage: NLL and Brier score after temperature scaling, DP
    calibration and, for one probability a sample or label, histogram binning and isotonic calibration, in 5 stratified
    folds. It is omitted above 2^20 samples (for labels: samples times labels) or 2^26 values of `preds`, for soft
    targets, and where a class, or an outcome of a label, has too few samples for two folds. DP calibration is omitted
    where samples times squared classes exceed 2^31.

    Every calibration error has a noise floor (its expected value if the model were perfectly calibrated), a p-value and
    a 95 % interval of its population value, for TCE of its expected value; see `torchcalib.inference.CalibrationTest`.
    They need no predictions, only accumulated sums. Errors over more than 2^15 bins of classes have no interval, and
    rank-based errors of many labels have none of them. `sentence` is based on those of the main ECE.

    Scores, DSC and UNC have a 95 % percentile bootstrap interval of 199 replicates, up to 2^18 events (samples, or
    samples times classes), or 2^13 for DSC and UNC. `torchcalib.inference.bootstrap` computes intervals of other
    values.

    `notes` lists all omissions.

    Args:
        preds: probabilities (or logits): binary `(N,)`, multi-class `(N, C)`, multi-label `(N, L)`; further axes are
            samples too.
        target: labels or soft targets; see `torchcalib.functional.nll`.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        n_bins: number of equal-width bins, and for ACE of equal-mass bins.
        right: bins are `(a, b]` instead of `[a, b)`.
        with_calibration: try calibrators, which takes most of the time and keeps a copy of `preds`.
        with_intervals: compute intervals, and the evidence of rank-based errors, which takes some seconds at most and
            keeps a copy of `preds`. Errors over equal-width bins always have a noise floor and a p-value.
        groups: integers from 0 on of the shape of samples, -1 for a row of no group, at most 10,000 different ones.
            `Report.groups` lists the groups whose ECE is furthest above its noise floor.
        group_names: of the groups by their numbers; None if the numbers are the names.
        **options: see `torchcalib.functional.InputOptions`.

    Returns:
        A `Report`. Print it, index it (`report["ece/top_label"]`), or make files of it with
        `torchcalib.reporting.save_report`.

    Raises:
        TypeError, ValueError: for bad input; the message names the rule.

    Example:
        >>> import torch
        >>> r = report(torch.tensor([0.2, 0.7, 0.9, 0.4]), torch.tensor([0, 1, 1, 1]), task="binary", n_bins=2)
        >>> round(r["ece/positive"], 6)
        0.2
    """
    weights = options.pop("weights", None)
    builder = ReportBuilder(
        task=task,
        n_bins=n_bins,
        right=right,
        with_calibration=with_calibration,
        with_intervals=with_intervals,
        **options,
    )
    builder.update(preds, target, weights=weights, groups=groups, group_names=group_names)
    return builder.report()
