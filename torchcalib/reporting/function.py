"""A report of predictions that are there at once."""

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

    Scores (accuracy, NLL, Brier, ECD), and of every reduction errors over equal-width bins (ECE, ESCE, MCE, RMSCE).
    Where one series of confidences is looked at, and for labels one by one, also what is read from the sample in order:
    ACE with the same number of bins, TCE by default as `torchcalib.tce` has it (a table of what it rejects is in
    `tests`), KS, and the parts of the Brier score of the event, MCB - DSC + UNC. For every class of a multi-class task
    these would cost too much; `torchcalib.ace` and the others compute them.

    TCE and the parts count labels: they are left out for soft targets. All that is read from the order counts copies of
    samples: it is left out where weights are not whole numbers. `notes` says so. Above 2^24 samples (for labels:
    samples times labels) they are read from a sketch: exact for data in which every probability has moved by less than
    1 / 2,048 in log-odds, and for float16 and bfloat16 probabilities as they are; `torchcalib.core.ranked.LogitCells`
    says how far off each number can be. (Labels have coarser cells if they are more than 16; `settings` says how
    coarse.)

    `calibration` says what a calibration stage would gain: NLL and Brier score under temperature scaling, DP
    calibration and, where there is one probability for a sample or label, histogram binning and isotonic calibration,
    in 5 stratified folds. It is left out above 2^20 samples (for labels: samples times labels) or 2^26 values of
    `preds`, for soft targets, and where a class, or either outcome of a label, has too few samples to be in two folds;
    `notes` says so. DP calibration is not tried where samples times squared classes are more than 2^31.

    Every calibration error has a noise floor (what it would be on average if the model were perfectly calibrated), a
    p-value and a 95 % interval of its value without noise, of TCE that of its expected value; see
    `torchcalib.Evidence`. They follow from what was streamed, at any number of samples. Errors over more than 2^15
    bins of classes go without the interval, and what is read from samples in order of many labels without all of it;
    `notes` says so. `sentence` follows from those of the main ECE.

    Scores, DSC and UNC have a 95 % percentile bootstrap interval of 199 replicates, up to 2^18
    events (samples, or samples times classes), and 2^13 where samples are put in order; `notes` says which have none.
    `torchcalib.bootstrap` computes intervals of anything else, among them those of calibration losses.

    Args:
        preds: probabilities (or logits): binary `(N,)`, multi-class `(N, C)`, multi-label `(N, L)`; further axes are
            samples too.
        target: labels or soft targets; see `torchcalib.nll`.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        n_bins: number of equal-width bins, and for ACE of equal-mass bins.
        right: bins are `(a, b]` instead of `[a, b)`.
        with_calibration: whether to try calibrators, which takes longer than all the rest and keeps a copy of `preds`.
        with_intervals: whether to compute intervals, and the evidence of what is read from samples in order; this takes
            some seconds at most, and keeps that copy too. Noise floors and p-values of errors over equal-width bins,
            and with them the sentence, are there in any case.
        groups: integers from 0 on of the shape of samples, -1 for a row of no group: the report lists the groups whose
            ECE is furthest above what chance explains (`Report.groups`). At most 10,000.
        group_names: of the groups by their numbers; None where the numbers are the names.
        **options: see `torchcalib.InputOptions`.

    Returns:
        A `Report`. Print it, index it (`report["ece/top_label"]`), or make files of it with `torchcalib.save_report`.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Example:
        >>> import torch
        >>> r = report(torch.tensor([0.2, 0.7, 0.9, 0.4]), torch.tensor([0, 1, 1, 1]), task="binary", n_bins=2)
        >>> round(r["ece/positive_class"], 6)
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
