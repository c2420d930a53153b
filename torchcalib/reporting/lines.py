"""Values of the lines of a report, computed from accumulated statistics."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from torchcalib.core.arguments import Task
from torchcalib.core.bins import BinTable, TCETable
from torchcalib.core.events import Mode, NamedMode
from torchcalib.core.partition import AnyPartition
from torchcalib.core.predictions import Predictions
from torchcalib.core.ranked import RankedSample
from torchcalib.core.sums import BinStats, ScoreSum, kish_number
from torchcalib.functional.scores import ScoreEstimator
from torchcalib.io.text import decimals_of
from torchcalib.ops.segments import equal_width_edges
from torchcalib.reporting.catalogue import (
    BY_CLASS,
    Catalogue,
    Member,
    bins_of,
    counts_of,
    has_table,
    sample_of,
    values,
)
from torchcalib.results.lines import Line

_MAX_MEAN_COPIES, _MAX_DIFFERENT_COPIES = 10, 20  # of integer weights that do not look like importance weights


@dataclass(frozen=True, eq=False)
class Data:
    """The accumulated data of one set of predictions, from which its report, or a part of a comparison, is computed."""

    catalogue: Catalogue
    statistics: Mapping[str, Any]  # sums and ranked samples, by name; without samples if any weight is fractional
    has_labels: bool = True  # whether all outcomes of the samples are 0 or 1; some metrics are omitted if not
    predictions: Predictions | None = None  # all predictions; None if they were not stored
    why_not: str = ""  # reason why `predictions` is None, as a clause
    resolution: int | None = None  # cells per unit of log-odds if samples are sketches; None if they are exact
    n_rows: int | None = None  # number of rows in sketches, multi-label: of entries; None if samples are exact
    clusters: Mapping[str, AnyPartition] | None = None  # statistics by cluster, by name; None if rows are independent
    clusters_determine_label: bool = False  # see `determine_label`; False if the predictions are not stored
    groups: tuple[tuple[str, ...], BinStats] | None = None  # names and bins of all groups
    # Parts of the name of each group of several columns, "" for a missing value, and their bins
    combinations: tuple[Sequence[Sequence[str]], BinStats] | None = None
    n_dropped: int = 0  # number of rows excluded by nan_policy='drop'
    has_several_samples_per_item: bool = False  # whether an item has several samples, such as pixels, without clusters

    @property
    def task(self) -> Task:
        """Task of the predictions."""
        return self.catalogue.task

    @cached_property
    def members(self) -> list[Member]:
        """The metrics of the catalogue that can be computed from these statistics."""
        members = (each for each in self.catalogue.members if each.statistic in self.statistics)
        return [each for each in members if self.has_labels or not each.declaration.needs_labels]

    @cached_property
    def bins(self) -> dict[NamedMode, BinStats]:
        """Sums over equal-width bins, by mode."""
        return self._by_mode(bins_of)

    @property
    def main_mode(self) -> NamedMode:
        """Mode of the verdict, the first one."""
        return next(iter(self.bins))

    @property
    def main_bins(self) -> BinStats:
        """Sums over equal-width bins of the main mode."""
        return self.bins[self.main_mode]

    @property
    def samples(self) -> dict[NamedMode, RankedSample]:
        """Ranked samples, by mode: `(N,)`, for mode "classwise" `(L, N)`."""
        return self._by_mode(sample_of)

    def _by_mode(self, name_of: Callable[[Mode], str]) -> dict[NamedMode, Any]:
        names = {mode: name_of(mode) for mode in self.catalogue.modes}
        return {mode: self.statistics[name] for mode, name in names.items() if name in self.statistics}

    @property
    def _by_class(self) -> ScoreSum:
        """Sums of a score for each class. Only the total weights of the classes are used."""
        sums: ScoreSum = self.statistics[BY_CLASS]
        return sums

    @cached_property
    def n(self) -> float:
        """Sum of all weights."""
        return float(self._by_class.total.sum())

    @cached_property
    def effective_n(self) -> float:
        """Number of samples; for floating weights Kish's effective number (sum w)^2 / sum w^2, whatever their unit."""
        bins = self.main_bins
        n, square = (x.reshape(-1, x.shape[-1]).sum(-1) for x in (bins.n, bins.weight_square))
        if self.task != "multilabel":
            n, square = n.sum(0, keepdim=True), square.sum(0, keepdim=True)
        return float(kish_number(n, square).sum())

    @cached_property
    def weights_are_copies(self) -> bool:
        """Whether sums of weights are numbers of samples."""
        return bool((self.main_bins.weight_square == self.main_bins.n).all())

    @property
    def note_on_copies(self) -> tuple[str, bool]:
        """Sentence on integer weights above 1, and whether it is a warning; an empty string without such weights.

        Integer weights are numbers of copies. More than 20 different ones, or a mean above 10, look like importance. A
        sketch does not store single weights, so only the mean is checked.
        """
        sample = next(iter(self.samples.values()), None)
        if sample is None or sample.n is None or not self.weights_are_copies:
            return "", False
        copies = sample.n[(sample.n > 0) & ~sample.score.isnan()]
        n, n_rows = int(copies.sum()), copies.numel() if self.n_rows is None else self.n_rows
        if n == n_rows:
            return "", False
        unit = "entries" if self.task == "multilabel" else "rows"
        note = f"{n_rows:,} {unit} count as {n:,} samples, because integer weights are numbers of copies."
        n_different = torch.unique(copies).numel() if self.n_rows is None else 0
        looks_like_importance = n > _MAX_MEAN_COPIES * n_rows or n_different > _MAX_DIFFERENT_COPIES
        if looks_like_importance:
            note += (
                " If weights express importance, such as survey weights, pass floating weights: as copies, they make "
                "p-values too small and intervals too narrow."
            )
        return note, looks_like_importance

    @cached_property
    def priors(self) -> tuple[float, ...]:
        """Frequency of each class; multi-label: frequency of each label."""
        share = self._by_class.share
        return tuple((share[..., 1] if self.task == "multilabel" else share).tolist())

    @cached_property
    def impossible(self) -> list[tuple[float, float]]:
        """Weight of the outcomes with predicted probability 0, and of the predictions that exclude this outcome.

        The first pair is for outcome 1 and predictions 0, the second for outcome 0 and predictions 1. A multi-class
        task has one pair, with the weight of all samples. Empty without the sums of `counts_of`.
        """
        found = [self.statistics[name] for name in counts_of(self.task) if name in self.statistics]
        counts = [float(each.score.sum()) for each in found]
        if self.task == "multiclass":
            return [(each, self.n) for each in counts]
        return list(zip(counts[::2], counts[1::2], strict=True))

    @cached_property
    def decimals(self) -> int | None:
        """Number of decimals, 0 to 3, to which all confidences of the main mode are rounded; None if they are not."""
        sample = next(iter(self.samples.values()), None)
        if sample is None or self.resolution is not None or sample.from_logits:
            return None
        return decimals_of(sample.score[sample.score.isfinite()], 3, 1e-6)

    @property
    def num_classes(self) -> int:
        """Number of classes or labels."""
        return 2 if self.task == "binary" else len(self.priors)

    @property
    def only_class(self) -> int | None:
        """Class of all targets, for a multi-label task 0 or 1; None if there are several."""
        if self.task != "multilabel":
            return self.priors.index(1) if max(self.priors) == 1 else None
        frequencies = set(self.priors)
        return int(frequencies.pop()) if frequencies in ({0.0}, {1.0}) else None

    @property
    def only_class_in_words(self) -> str:
        """Class of all targets, such as `"class 2"`; an empty string if there are several."""
        if self.only_class is None:
            return ""
        return f"{self.only_class}" if self.task == "multilabel" else f"class {self.only_class}"

    @cached_property
    def tables(self) -> dict[NamedMode, BinTable]:
        """Table of equal-width bins for each mode, with all labels pooled."""
        return {mode: bin_table(self.task, bins) for mode, bins in self.bins.items() if has_table(self.task, mode)}

    def tests(self) -> dict[NamedMode, TCETable]:
        """Return the bins of the test-based error (TCE) for each mode, all labels pooled; empty for soft targets."""
        tables = {}
        for member in self.members:
            if member.declaration.key == "tce" and member.mode is not None:
                estimator: Any = member.estimator
                bins = estimator.ranked_bins(self.samples[member.mode].pooled())
                how = {name: member.settings[name] for name in ("alpha", "test")}
                tables[member.mode] = bins.test_table(**how)
        return tables

    def lines(self) -> list[Line]:
        """Return all lines, without noise floors, p-values and intervals."""
        found = _numbers(values(self.members, self.statistics))
        naive: dict[str, float] = {}
        for member in self.members:
            if isinstance(estimator := member.estimator, ScoreEstimator):
                of_prior = estimator.of_prior(self.statistics[member.statistic])
                naive[member.key] = 1.0 if estimator.normalize else float(of_prior)
        selective = [member for member in self.members if member.is_selective]
        if selective:
            n = self._by_class.n
            total = n.sum(-1, keepdim=True)
            correct = n[..., 1:] if self.catalogue.are_confidences else n.amax(-1, keepdim=True)
            # As a probability of the positive class above 1/2, the score is not changed by `of_predicted_class`.
            constant = RankedSample(torch.full_like(total, 0.75), correct, total, False)
            naive |= _numbers(values(selective, {selective[0].statistic: constant}))
        perfect: dict[str, float] = {}
        for mode in self.samples if self.has_labels else ():
            # A perfect predictor has discrimination (DSC) = uncertainty (UNC). For the top label both are 0.
            # The naive top label is the most frequent class. If its frequency is f, the uncertainty is f (1 - f).
            unc, largest = found[f"unc/{mode}"], max(self.priors)
            is_top = mode == "top_label" and not self.catalogue.are_confidences
            perfect |= dict.fromkeys((f"dsc/{mode}", f"unc/{mode}"), 0.0 if is_top else unc)
            naive[f"unc/{mode}"] = largest * (1 - largest) if is_top else unc
        return [
            member.line(found[member.key], naive.get(member.key, 0.0), perfect.get(member.key))
            for member in self.members
        ]


def bin_table(task: Task, bins: BinStats) -> BinTable:
    """Return the table of equal-width bins, with all labels pooled."""
    pooled = replace(bins, sums=bins.sums.sum(0)) if task == "multilabel" else bins
    return BinTable.from_bins(pooled, equal_width_edges(pooled.n.shape[-1], pooled.n))


def _numbers(found: Mapping[str, Tensor]) -> dict[str, float]:
    """Return scalar tensors as numbers, read at once, because each read waits for the device."""
    return dict(zip(found, torch.stack(list(found.values())).tolist(), strict=True))
