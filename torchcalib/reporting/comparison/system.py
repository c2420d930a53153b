"""One of the systems that are compared: what is kept of its predictions, and what is read from that."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from torchcalib.core.events import NamedReduction, reductions_of
from torchcalib.core.predictions import Predictions
from torchcalib.core.ranked import ExactSample
from torchcalib.core.sums import EqualWidthBins
from torchcalib.reporting.comparison.groups import Draws, GroupedSample, GroupedSums
from torchcalib.reporting.data import Line
from torchcalib.reporting.intervals import Reading, bin_readings, score_readings
from torchcalib.reporting.lines import SCORES, error_lines, order_lines, order_values, score_lines

MOST_KEPT = 2**20
"""Samples that are kept to be put in order, every label of a sample being one."""

MOST_IN_ORDER, REPLICATES_IN_ORDER = 2**14, 199
"""Samples up to which there are intervals of what is read from their order, and from how many replicates at most."""

_FEW = 1000  # groups, of which intervals are uncertain by 2 % and more

_NO_VERDICT = ("UNC",)  # is a matter of the data, neither good nor bad


class System:
    """Sums and samples of one system, by group.

    Args:
        like: some of its predictions.
        n_bins, right: see `torchcalib.report`.
    """

    def __init__(self, like: Predictions, n_bins: int, right: bool) -> None:
        self._task, self._n_bins = like.task, n_bins
        bins = {r: EqualWidthBins(r, n_bins, right) for r in reductions_of(like.task)}
        found = [*score_readings(like), *bin_readings(bins)]
        self._sums: list[tuple[Reading, GroupedSums[Any]]] = [
            (reading, GroupedSums(reading.recipe, like))
            for reading in found
            if not isinstance(reading.recipe, ExactSample)
        ]
        self.samples: dict[NamedReduction, GroupedSample] = {
            r: GroupedSample(ExactSample(r), MOST_KEPT) for r in bins if r != "classwise" or like.task == "multilabel"
        }

    def add(self, p: Predictions, words: Tensor) -> None:
        """Add rows, given the numbers that tell their groups."""
        for _, sums in self._sums:
            sums.add(p, words)
        for sample in self.samples.values():
            sample.add(p, words)

    @property
    def few_groups(self) -> dict[int, str]:
        """What has sums in so few groups that a reader must know of it, by how many they are."""
        found: dict[int, list[str]] = defaultdict(list)
        for reading, sums in self._sums:
            if sums.n_groups <= _FEW:
                found[sums.n_groups].append(reading.name)
        return {n: ", ".join(names) for n, names in found.items()}

    @property
    def n(self) -> Tensor:
        """Weight of all samples `(...)`: of every label."""
        found: Tensor = self._sums[0][1].statistic().total
        return found

    def lines(self, ordered: bool, has_labels: bool) -> list[Line]:
        """Return every number that is better or worse, with those of samples in order if they are `ordered`."""
        lines: list[Line] = []
        likeliest = float(self._shares.max())
        for (_, sums), metric in zip(self._sums, SCORES, strict=False):
            lines += score_lines(metric, sums.statistic(), self._task)
        for (_, sums), reduction in zip(self._sums[len(SCORES) :], reductions_of(self._task), strict=True):
            lines += error_lines(sums.statistic(), reduction)
            if ordered and reduction in self.samples:
                sample = self.samples[reduction].sample()
                lines += order_lines(sample, has_labels, reduction, self._n_bins, likeliest)[0]
        return [line for line in lines if line.name not in _NO_VERDICT]

    def chance(self) -> dict[str, float]:
        """Return the ECE that a calibrated system of these confidences would show on average, by the keys of lines.

        The gap of its bin is about normal with variance c (1 - c) / n, where weights count copies.
        """
        found = {}
        for (_, sums), reduction in zip(self._sums[len(SCORES) :], reductions_of(self._task), strict=True):
            b = sums.statistic()
            deviation = (b.share * (b.confidence * (1 - b.confidence) / b.n).sqrt()).nan_to_num()
            found[f"ece/{reduction}"] = math.sqrt(2 / math.pi) * float(deviation.sum(-1).mean())
        return found

    @torch.no_grad()
    def replicates(self, draws: Draws, ordered: bool, has_labels: bool) -> dict[str, Tensor]:
        """Read replicates `(R,)`, by the keys of lines; of samples in order fewer."""
        found: dict[str, list[Tensor]] = defaultdict(list)
        for values in self._values(draws, ordered, has_labels):
            for key, value in values.items():
                found[key].append(value.cpu())
        return {key: torch.cat(values) for key, values in found.items()}

    def _values(self, draws: Draws, ordered: bool, has_labels: bool) -> Iterator[Mapping[str, Tensor]]:
        for reading, sums in self._sums:
            for statistic in sums.replicates(draws) if sums.n_groups > 1 else ():
                yield reading.values(statistic)
        for reduction, kept in self.samples.items() if ordered else ():
            if kept.size > MOST_IN_ORDER:
                continue
            for sample in kept.replicates(draws, REPLICATES_IN_ORDER):
                yield order_values(sample, has_labels, reduction, self._n_bins)

    @property
    def _shares(self) -> Tensor:
        share: Tensor = self._sums[0][1].statistic().share
        return share[..., 1] if self._task == "multilabel" else share
