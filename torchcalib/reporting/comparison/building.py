"""From the predictions of several systems to a `Comparison`."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import reduce
from typing import Any, get_args

import torch
from torch import Tensor

from torchcalib.core.arguments import NanPolicy, Task, check_choice, check_count, check_flag, check_seed
from torchcalib.core.inputs import InputFormat
from torchcalib.core.predictions import Predictions
from torchcalib.core.ranked_bins import Binning
from torchcalib.inference.interval import Interval
from torchcalib.metrics.binned.ace import ACE
from torchcalib.metrics.binned.reading import BinnedMetric
from torchcalib.metrics.ranked.ks import KS
from torchcalib.metrics.ranked.reading import RankedMetric
from torchcalib.metrics.ranked.tce import TCE
from torchcalib.metrics.scores.engine import ScoreMetric
from torchcalib.reporting.comparison.groups import Draws, words_of
from torchcalib.reporting.comparison.sentence import sentence_of
from torchcalib.reporting.comparison.system import MOST_IN_ORDER, MOST_KEPT, REPLICATES_IN_ORDER, System
from torchcalib.reporting.data import (
    Better,
    ComparedLine,
    Comparison,
    Difference,
    Line,
    LineInterval,
    Quantity,
    Verdict,
)
from torchcalib.reporting.intervals import LEVEL, interval_of
from torchcalib.reporting.lines import ERRORS, SCORES
from torchcalib.reporting.metrics import MOST_BINS, MOST_COPIES, are_counts, check_size

N_REPLICATES = 999
"""24 of them lie below an interval, and 24 above."""

_DIRECTIONS: dict[bool | None, Better] = {True: "higher", False: "lower", None: "nearer to 0"}
_METRICS: tuple[type[ScoreMetric | BinnedMetric | RankedMetric], ...] = (*SCORES, *ERRORS, ACE, TCE, KS)
_BETTER: dict[str, Better] = {m.__name__: _DIRECTIONS[m.higher_is_better] for m in _METRICS}
_BETTER["DSC"] = "higher"
"""What is better in a number, by its name; in one that is not here, what is lower."""

_SIZED = ("ECE", "MCE", "RMSCE", "ACE", "KS")
"""What is a size of chance gaps where there are no others. A replicate doubles their variance, and so makes the number
of a calibrated system larger by sqrt(2) - 1 of what it is: from the bias of replicates follows what chance adds. Of
ECE that is known without, and better: a bin without a single outcome has replicates without any, too."""

_UNFIT = ("RMSCE debiased",)
"""What takes off the noise of its bins, and does not know of that of a replicate, which repeats samples."""


def compare(
    systems: Mapping[str, Tensor],
    target: Tensor,
    *,
    task: Task,
    n_bins: int = 15,
    right: bool = False,
    n_replicates: int = N_REPLICATES,
    seed: int = 0,
    nan_policy: NanPolicy = "raise",
    from_logits: bool | Mapping[str, bool] = False,
    weights: Tensor | None = None,
    ignore_index: int | None = None,
    positive_classes: Sequence[int] | None = None,
    class_axis: int = -1,
) -> Comparison:
    """Compare systems that predicted the same targets, number by number, with paired bootstrap intervals.

    The numbers are those of `torchcalib.report`: scores (accuracy, NLL, Brier, ECD, and NLL and Brier as a share of
    what the class shares get), of every reduction errors over equal-width bins, and of one series of confidences, and
    of labels, what is read from samples in order. UNC is left out: it is a matter of the data.

    A difference is that of a system to the first one. ECD and ESCE have a sign, and what counts is how far they are
    from 0: their difference is one of sizes. It has a 95 % percentile interval of replicates that all systems share,
    which is narrow where they err on the same samples. Where replicates have a bias that matters (a quarter of their
    standard deviation) it is moved by that, so that it lies about the difference of numbers that chance makes too
    large. `"better"` and `"worse"` are said where 0 lies outside, and would still if the part that chance gaps may have
    in the difference of an error (`Difference.chance`) were taken off: of two calibrated systems the one whose
    confidences are further from 0 and 1 has the larger ECE.

    Replicates draw rows, which are the entries of the first axis: all pixels of an image together. From some thousand
    rows on they draw random groups of rows, 8,192, and fewer where sums are many (class-wise errors of 1,000 classes
    have 128): memory and time stay bounded. `notes` says so where an interval is thereby less certain, and where there
    is none: of class-wise errors with more than 65,536 sums (classes times bins times 3), of what is read from samples
    in order above 2^14 samples (for labels: samples times labels), and of RMSCE debiased, which does not fit a
    bootstrap. Above 2^20 samples what is read from their order is left out.

    Args:
        systems: predictions by the name of their system, the baseline first: probabilities (or logits), binary `(N,)`,
            multi-class `(N, C)`, multi-label `(N, L)`; further axes are samples too. Two at least.
        target: labels or soft targets of all; see `torchcalib.nll`.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        n_bins: number of equal-width bins, and for ACE of equal-mass bins.
        right: bins are `(a, b]` instead of `[a, b)`.
        n_replicates: of the intervals; of what is read from samples in order at most 199.
        seed: of the draws, which are the same on every device.
        nan_policy: `"drop"` leaves out rows in which a system has no number (NaN, an infinite probability, logits of
            which all are -inf), of all systems, and counts them in `Comparison.n_dropped`; `"raise"` raises.
        from_logits: whether predictions are logits; one for all or, by name, for each.
        weights: of samples, `(N,)`; like what follows, see `torchcalib.InputOptions`. They are those of all systems.
        ignore_index: rows with this target are dropped.
        positive_classes: multi-class input is read as binary, these classes against the rest.
        class_axis: the axis of classes or labels.

    Returns:
        A `Comparison`. Print it, index it (`compared["nll"].differences["b"]`), or make files of it with
        `torchcalib.save_comparison`.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold, and of which system.

    Gradient:
        None.

    Source:
        Efron, Tibshirani: An Introduction to the Bootstrap (1993), ch. 13.3, for percentile intervals; Oza, Russell:
        Online bagging and boosting (AISTATS 2001), for Poisson weights; Wolter: Introduction to Variance Estimation
        (2007), ch. 2, for random groups.

    Example:
        >>> g = torch.Generator().manual_seed(0)
        >>> honest = torch.rand(2000, generator=g)
        >>> target = torch.bernoulli(honest, generator=g).long()
        >>> compared = compare({"honest": honest, "sure": (3 * honest.logit()).sigmoid()}, target, task="binary")
        >>> compared["nll"].differences["sure"].verdict
        'worse'
        >>> compared["accuracy"].differences["sure"].value
        0.0
    """
    builder = ComparisonBuilder(
        tuple(systems),
        task=task,
        n_bins=n_bins,
        right=right,
        n_replicates=n_replicates,
        seed=seed,
        nan_policy=nan_policy,
        from_logits=from_logits,
        ignore_index=ignore_index,
        positive_classes=positive_classes,
        class_axis=class_axis,
    )
    builder.update(systems, target, weights=weights)
    return builder.comparison()


class ComparisonBuilder:
    """Takes the predictions of all systems piece by piece and makes a `Comparison`. Arguments are those of `compare`.

    Memory does not grow with the number of rows, except for up to 2^20 samples whose order is read.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        task: Task,
        n_bins: int = 15,
        right: bool = False,
        n_replicates: int = N_REPLICATES,
        seed: int = 0,
        nan_policy: NanPolicy = "raise",
        from_logits: bool | Mapping[str, bool] = False,
        **options: Any,
    ) -> None:
        binning = Binning("equal_width", n_bins, right)
        check_count("n_bins", n_bins, at_most=MOST_BINS)
        check_count("n_replicates", n_replicates, at_least=math.ceil(2 / (1 - LEVEL)) - 1)
        check_seed(seed)
        check_choice("nan_policy", nan_policy, get_args(NanPolicy))
        self._names = _checked_names(names)
        declared = from_logits if isinstance(from_logits, Mapping) else dict.fromkeys(self._names, from_logits)
        if set(declared) != set(self._names):
            raise ValueError(
                f"`from_logits` must say it of {', '.join(map(repr, self._names))}, "
                f"got {', '.join(map(repr, declared)) or 'none'}. Pass one bool for all, or one for each."
            )
        for value in declared.values():
            check_flag("from_logits", value)
        self._formats = {name: InputFormat(task, from_logits=declared[name], **options) for name in self._names}
        self._binning, self._n_replicates, self._seed = binning, n_replicates, seed
        self._drop = nan_policy == "drop"
        self._settings = {
            "n_bins": n_bins,
            "right": right,
            "from_logits": {name: declared[name] for name in self._names},
            "ignore_index": options.get("ignore_index"),
            "n_replicates": n_replicates,
            "level": LEVEL,
            "seed": seed,
        }
        self._systems: dict[str, System] = {}
        self._width: int | None = None
        self._n_rows = self._n_dropped = 0
        self._are_counts = self._are_labels = True

    def update(self, preds: Mapping[str, Tensor], target: Tensor, *, weights: Tensor | None = None) -> None:
        """Add the predictions that all systems made of the same rows. If any are bad nothing is added."""
        width = self._checked_width(preds, target, weights)
        n_dropped = 0
        if self._drop:
            weights, n_dropped = self._without_missing_rows(preds, target, weights)
        read: dict[str, Predictions] = {}
        for name in self._names:
            with _of_system(name):
                read[name] = self._formats[name].read(preds[name], target, weights, batch_shape=())
        one = read[self._names[0]]
        n_rows = self._rows_of(preds[self._names[0]])
        if not self._systems:
            self._systems = {name: System(p, self._binning.n_bins, self._binning.right) for name, p in read.items()}
        words = words_of(self._seed, self._n_rows, n_rows, one.given.device)
        for name, p in read.items():
            self._systems[name].add(p, words)
        self._width, self._n_rows, self._n_dropped = width, self._n_rows + n_rows, self._n_dropped + n_dropped
        self._are_counts &= are_counts(weights)
        self._are_labels &= _are_labels(one)

    def comparison(self, sources: Mapping[str, Mapping[str, Any]] | None = None) -> Comparison:
        """Read everything off what was kept.

        Raises:
            ValueError: if nothing was added.
        """
        n = float(self._systems[self._names[0]].n.sum()) if self._systems else 0.0
        if not n > 0:
            raise ValueError("`preds` must hold at least one sample that counts, got none. Nothing can be compared.")
        kept = next(iter(self._systems.values())).samples.values()
        ordered = self._are_counts and not any(sample.is_full for sample in kept) and n <= MOST_COPIES
        task = self._formats[self._names[0]].read_as
        of_systems = {name: system.lines(ordered, self._are_labels) for name, system in self._systems.items()}
        draws = Draws(self._seed, self._n_replicates, self._systems[self._names[0]].n.device)
        replicates = {
            name: system.replicates(draws, ordered, self._are_labels) for name, system in self._systems.items()
        }
        chance = {name: system.chance() for name, system in self._systems.items()}
        lines = tuple(
            _compared(
                dict(zip(self._names, same, strict=True)),
                {name: r.get(same[0].key) for name, r in replicates.items()},
                {name: c.get(same[0].key) for name, c in chance.items()},
            )
            for same in zip(*of_systems.values(), strict=True)
        )
        return Comparison(
            task=task,
            n=n,
            n_dropped=self._n_dropped,
            num_classes=2 if task == "binary" else self._width or 2,
            systems=self._names,
            lines=lines,
            sentences={name: sentence_of(lines, self._names[0], name) for name in self._names[1:]},
            settings=self._settings,
            sources=dict(sources or {}),
            notes=(
                *self._notes(ordered, [sample.size for sample in kept]),
                *_of_empty(replicates[self._names[0]], self._n_rows),
            ),
        )

    def _checked_width(self, preds: Mapping[str, Tensor], target: Tensor, weights: Tensor | None) -> int:
        """Check all that can be told without looking at values; return the number of classes or labels."""
        if set(preds) != set(self._names):
            raise ValueError(
                f"`preds` must hold predictions of {', '.join(map(repr, self._names))}, got "
                f"{', '.join(map(repr, preds)) or 'none'}. Name them as they were named at first."
            )
        for name in self._names:
            with _of_system(name):
                self._formats[name].check(preds[name], target, weights)
        first = preds[self._names[0]]
        if len(shapes := {tuple(preds[name].shape) for name in self._names}) > 1:
            raise ValueError(
                f"`preds` must have one shape for all systems, got {' and '.join(map(str, sorted(shapes)))}. "
                "Compare predictions of the same rows."
            )
        how = self._formats[self._names[0]]
        width = 2 if how.task == "binary" else first.shape[how.class_axis]
        if self._width not in (None, width):
            raise ValueError(
                f"`preds` must have {self._width} entries on its class axis, got shape {tuple(first.shape)}. "
                "Give every piece all classes, as the first one has them."
            )
        check_size(how.read_as, width, self._binning.n_bins)
        return width

    def _rows_of(self, preds: Tensor) -> int:
        """Entries of the first axis, which replicates draw."""
        how = self._formats[self._names[0]]
        if how.task == "binary":
            return len(preds)
        return preds.movedim(how.class_axis, -1).shape[0] if preds.dim() > 1 else 1

    def _without_missing_rows(
        self, preds: Mapping[str, Tensor], target: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, int]:
        """Weights that are 0 where any system, or the target, is missing; and of how many more rows."""

        def missing_of(name: str) -> Tensor:
            how = self._formats[name]
            rows = how.missing_in(preds[name], target)
            return rows.any(how.class_axis) if how.task == "multilabel" else rows

        missing = reduce(torch.logical_or, map(missing_of, self._names))
        if weights is None:
            return (~missing).long(), int(missing.sum())
        return weights.masked_fill(missing, 0), int((missing & (weights != 0)).sum())

    def _notes(self, ordered: bool, sizes: Sequence[int]) -> tuple[str, ...]:
        names = "ACE, TCE, KS, MCB and DSC"
        notes = []
        if self._n_dropped:
            notes.append(
                f"{self._n_dropped:,} rows are left out of all systems, because the predictions of one of them are no "
                "numbers there."
            )
        if not ordered:
            why = f"there are more than {MOST_KEPT:,} samples"
            if not self._are_counts:
                why = "they count copies of a sample, and weights are no counts"
            notes.append(f"{names} are left out: {why}.")
        else:
            if not self._are_labels:
                notes.append("TCE, MCB and DSC are left out: they count labels, and targets are shares.")
            if max(sizes) > MOST_IN_ORDER:
                notes.append(
                    f"There is no interval of {names}, which are read from samples in order, above "
                    f"{MOST_IN_ORDER:,} samples."
                )
            elif self._n_replicates > REPLICATES_IN_ORDER:
                notes.append(f"Intervals of {names} come from {REPLICATES_IN_ORDER} replicates.")
        for n_groups, name in next(iter(self._systems.values())).few_groups.items():
            if n_groups == 1 < self._n_rows:
                notes.append(f"There is no interval of {name}: with so many classes the sums are too many.")
            elif n_groups < self._n_rows:
                notes.append(
                    f"Intervals of {name} are drawn from {n_groups:,} random groups of rows, and their width is "
                    f"uncertain by some {math.sqrt(0.5 / n_groups):.0%}."
                )
        return tuple(notes)


@contextmanager
def _of_system(name: str) -> Iterator[None]:
    """Say in an error of input which system it is of."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"system {name!r}: {error}") from error


def _checked_names(names: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if not isinstance(name, str) or not name.strip():
            raise TypeError(f"`systems` must have names, got {name!r}. Name each with some words.")
    if len(names) < 2:
        raise ValueError(f"`systems` must be two at least, got {len(names)}. Use torchcalib.report for one.")
    if len(set(names)) < len(names):
        raise ValueError(f"`systems` must have a name each, got {', '.join(map(repr, names))}. Rename one.")
    return tuple(names)


def _compared(
    lines: Mapping[str, Line], replicates: Mapping[str, Tensor | None], chance: Mapping[str, float | None]
) -> ComparedLine:
    """One number of all systems, which are given in order, and what chance gaps would add to each if that is known."""
    first, *others = lines
    part = {n: None if (a := chance[first]) is None or (b := chance[n]) is None else b - a for n in others}
    card = lines[first]
    better = _BETTER.get(card.name, "lower")
    known = {name: None if card.name in _UNFIT or (drawn := replicates[name]) is None else drawn for name in lines}
    return ComparedLine(
        **{each.name: getattr(card, each.name) for each in fields(Quantity)},
        better=better,
        values={name: line.value for name, line in lines.items()},
        intervals={
            name: None if (drawn := known[name]) is None else _if_known(interval_of(line, drawn))
            for name, line in lines.items()
        },
        differences={
            name: _difference(better, card.name, (lines[first], lines[name]), (known[first], known[name]), part[name])
            for name in others
        },
    )


def _difference(
    better: Better,
    name: str,
    lines: tuple[Line, Line],
    replicates: tuple[Tensor | None, Tensor | None],
    by_chance: float | None,
) -> Difference:
    a, b = (torch.tensor(line.value, dtype=torch.float64) for line in lines)
    value = _less(b, a, better)
    if replicates[0] is None or replicates[1] is None:
        return Difference(float(value), None, None, "not told apart")
    drawn = Interval(value, _less(replicates[1], replicates[0], better), LEVEL)
    bias = float(drawn.bias)
    if not abs(bias) > float(drawn.standard_error) / 4:  # nor does NaN or what has no end matter
        bias = 0.0
    found = _if_known(LineInterval(float(drawn.low) - bias, float(drawn.high) - bias))
    if found is None:
        return Difference(float(value), None, None, "not told apart")
    chance = float(drawn.bias) / (math.sqrt(2) - 1) if name in _SIZED else None
    if by_chance is not None:
        chance = by_chance
    verdict: Verdict = "not told apart"
    values = [line.value for line in lines]
    # Rows are read in float32 at least: what is 0 by its nature, such as ESCE class-wise, is so up to that.
    rounding = torch.finfo(torch.float32).eps * max([1.0, *(abs(x) for x in values if math.isfinite(x))])
    if found.low - max(0.0, chance or 0.0) > rounding or found.high - min(0.0, chance or 0.0) < -rounding:
        verdict = "better" if (found.low > 0) == (better == "higher") else "worse"
    return Difference(float(value), found, chance, verdict)


def _of_empty(replicates: Mapping[str, Tensor], n_rows: int) -> tuple[str, ...]:
    """A note, where some replicates hold no row, of which no number is known."""
    scores = replicates.get("brier")  # of one row there are no replicates at all
    if n_rows > 1 and (scores is None or not bool(scores.isnan().any())):
        return ()
    return ("There are no intervals: rows (entries of the first axis) are so few that some replicates hold none.",)


def _if_known(found: LineInterval) -> LineInterval | None:
    """An interval, or none where some replicates have no number: they hold no row, or infinity less infinity."""
    return None if math.isnan(found.low) or math.isnan(found.high) else found


def _less(b: Tensor, a: Tensor, better: Better) -> Tensor:
    """By how much b is more than a; of numbers that have a sign, by how much it is further from 0."""
    return b.abs() - a.abs() if better == "nearer to 0" else b - a


def _are_labels(p: Predictions) -> bool:
    """Whether no target that counts is a share of votes."""
    if p.hard:
        return True
    shares = p.target != p.target.round()
    if p.weights is not None:
        absent = p.weights == 0
        shares = shares & ~(absent.unsqueeze(-1) if p.soft else absent)
    return not bool(shares.any())
