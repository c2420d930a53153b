"""Audit a log of a language model: add its answers to a report for each definition of the confidence.

Answers are read in blocks, and a `ReportBuilder` for each definition keeps sums only. The number of options, whether
questions have several answers, and the scale of stated confidences determine the builders. If a later block contradicts
the first ones, the log is read again from its start.
"""

from __future__ import annotations

import math
import shlex
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchcalib.core.arguments import Task
from torchcalib.core.sums import BinStats
from torchcalib.display.words import listed, significant
from torchcalib.functional.binned import ece_from_bins
from torchcalib.inference.simulation import BinCells, Simulation
from torchcalib.io.errors import InputError, quoted, shown
from torchcalib.io.logs import CONFIDENCES, Log
from torchcalib.io.logs.blocks import NONE, SEVERAL, Block, Scores
from torchcalib.io.logs.fields import MOST_SYSTEMS
from torchcalib.io.logs.stated import Array, Scale, ScaleName
from torchcalib.io.text import hashes_of
from torchcalib.ops.log_odds import log_odds
from torchcalib.reporting.building import ReportBuilder
from torchcalib.reporting.lines import Data
from torchcalib.reporting.published import published
from torchcalib.results.audit import Audit, AuditedConfidence

_MAX_SCORES = 2**20  # scores of options that are added at once
_MAX_OPTIONS = 2**10  # largest number of options of an answer, which limits the memory for a block
_REPLICATES = 999  # of the quantile of ECE
_FEW = 20  # answers from which a frequent confidence is called a constant
_OF_TOKENS = ("raw", "per_token", "first_token")  # confidences that follow from the sampled tokens
_LARGE = 0.1  # ECE that an evaluation should detect
_STATED = ("stated", "reported", "forecast")
_LOW_SHARE = 0.5  # share of one confidence from which it is called a constant


@dataclass(frozen=True)
class AuditOptions:
    """Options of `audit` that all logs share."""

    n_bins: int
    with_intervals: bool
    with_calibration: bool
    same: Callable[[str, str], bool]
    as_published: str | None
    definition: str | None = None  # that the sentence names; None for the first
    scale: ScaleName | None = None  # chosen by the caller


@dataclass(frozen=True)
class Layout:
    """What the builders must know before the first answer."""

    width: int = 0  # largest number of options
    has_repeated_names: bool = False  # whether a name of a question occurs several times
    repeats: bool = False  # whether a question has several answers
    scales: Mapping[str, Scale] = field(default_factory=dict)  # evidence on the scale of stated confidences, by source


class ConfidenceColumn(NamedTuple):
    """Confidences of one definition: a source, and an event that they predict."""

    source: str
    event: str
    rows: Array  # number of the answer of each confidence
    preds: Tensor  # confidences `(n,)`, or the scores of options `(n, K)`
    target: Tensor
    from_logits: bool = False  # whether `preds` are log-probabilities of options


class _Documents:
    """Set of the questions seen so far. The numbers 0, 1, 2, ... need no memory, other identifiers 8 bytes each."""

    def __init__(self) -> None:
        self.n = 0
        self._seen: Any = None  # sorted hashes; None while all identifiers are the numbers 0 to n - 1

    def add(self, names: Sequence[str]) -> bool:
        """Add the questions of a block. Return True if one of them was seen before."""
        if self._seen is None:
            if list(names) == list(map(str, range(self.n, self.n + len(names)))):
                self.n += len(names)
                return False
            self._seen = hashes_of([str(k) for k in range(self.n)]).sort().values.numpy()
        # The algorithm of a stable sort merges sorted runs.
        both = np.sort(np.concatenate((self._seen, np.sort(hashes_of(names).numpy()))), kind="stable")
        is_new = np.append(True, both[1:] != both[:-1])
        self._seen = both[is_new]
        self.n = len(self._seen)
        return not is_new.all()


@dataclass
class _Group:
    """Answers to a question that have the same meaning."""

    text: str
    n: int = 0
    outcomes: set[float] = field(default_factory=set)  # whether the log calls them right


class _SampledAnswers:
    """Groups of the answers to each question. They stay in memory, because answers to a question may be anywhere."""

    def __init__(self, same: Callable[[str, str], bool]) -> None:
        self._same = same
        self._groups: dict[str, list[_Group]] = defaultdict(list)

    def add(self, block: Block) -> None:
        """Add each answer to the first group whose first answer has the same meaning, or to a new one."""
        for index, text in block.texts.items():
            groups = self._groups[f"{block.documents[index]}\n{block.contents[index]}"]
            group = next((each for each in groups if self._same(each.text, text)), None)
            if group is None:
                groups.append(group := _Group(text))
            group.n += 1
            if not math.isnan(block.correct[index]):
                group.outcomes.add(block.correct[index])
            elif index in block.voted and self._same(group.text, block.voted[index][0]):
                group.outcomes.add(block.voted[index][1])

    def majorities(self, counts: Counter[str]) -> Iterator[tuple[float, float]]:
        """Yield the frequency of the most frequent answer to each question with several, and whether it is right."""
        for groups in self._groups.values():
            n, largest = sum(group.n for group in groups), max(groups, key=lambda group: group.n)
            outcomes = {outcome for outcome in largest.outcomes if not math.isnan(outcome)}
            if n == 1:
                counts["question with one answer"] += 1
            elif len(outcomes) != 1:
                counts["most frequent answer that the log calls neither right nor wrong, or both"] += 1
            else:
                yield largest.n / n, outcomes.pop()


class AuditBuilder:
    """Sums over one pass through a log or a part of it. With `keep`, the answers and the columns of definitions too."""

    def __init__(
        self, log: Log, part: str | None, layout: Layout, options: AuditOptions, keep: bool, with_each: bool
    ) -> None:
        self.log, self.part, self.layout, self.options = log, part, layout, options
        self.with_each = with_each  # whether all options have a definition, and intervals and calibrators are computed
        self.is_contradicted = False
        self.definitions: dict[tuple[str, str], ReportBuilder] = {}  # by source and event
        self.problems: dict[str, str] = {}  # sources with an ambiguous scale, and why
        self.documents = _Documents()
        self.n_answers, self.n_judged, self.fewest = 0, 0, 0
        self.truth: list[float] = [0.0, 0]  # sum of log-probabilities of right answers, and their number
        self.samples = _SampledAnswers(options.same)
        self.omitted: Counter[str] = Counter()
        self.stated = array("d"), array("d")  # confidences and outcomes for `as_published`
        self.keep = keep
        self.questions: list[Tensor] = []  # hash of the question of each answer, by block
        self.columns: dict[tuple[str, str], list[ConfidenceColumn]] = defaultdict(list)

    def add(self, block: Block) -> None:
        """Add the answers of a block that fits the layout."""
        if self.layout.repeats:
            self.samples.add(block)
        self._count(block)
        # Without repeated questions, the number of an answer identifies its question.
        numbers = self.n_answers + torch.arange(len(block), device="cpu")
        questions = hashes_of(block.questions) if self.layout.repeats else numbers
        for column in self._columns(block):
            self._add(column, questions)
            if self.keep and column.event != "each":
                of_log = column._replace(rows=self.n_answers + column.rows)
                self.columns[column.source, column.event].append(of_log)
        if self.keep:
            has_contents = self.layout.has_repeated_names and not self.layout.repeats
            self.questions.append(hashes_of(block.questions if has_contents else block.documents))
        self.n_answers += len(block)

    def finish(self) -> None:
        """Add the frequencies of sampled answers, if they are of one system."""
        # Confidences that are 0 or 1, with outcomes that are not, are probably swapped.
        scale = self.layout.scales.get("reported")
        if scale is not None and not self.n_judged and not scale.has_fractions and 0 < scale.largest <= 1:
            raise InputError(
                f"`{self.log.path}` must have outcomes that are right or wrong, got other values, and confidences that "
                "are all 0 or 1. Check whether the columns of confidence and outcome are swapped."
            )
        if self.layout.repeats and not self.pooled:
            found = list(self.samples.majorities(self.omitted))
            if found:
                confidence, correct = torch.tensor(found, dtype=torch.float64, device="cpu").unbind(1)
                numbers = torch.arange(len(found), device="cpu")
                column = ConfidenceColumn("frequency", "most frequent", numbers.numpy(), confidence, correct.long())
                self._add(column, numbers)

    @property
    def counts(self) -> Counter[str]:
        """Numbers of rows by finding."""
        of_parts = self.log.counts_of
        logged = sum(of_parts.values(), Counter()) if self.part is None else of_parts.get(self.part, Counter())
        return logged + self.omitted

    @property
    def pooled(self) -> Mapping[str, set[Any]]:
        """Values of the fields that name systems, of which the answers of several are pooled."""
        found: dict[str, set[Any]] = {}
        for part, systems in self.log.systems.items():
            for name, values in systems.items():
                if self.part in (None, part) and name != self.log.options.by:
                    found[name] = found.get(name, set()) | values
        most = min(MOST_SYSTEMS, self.n_answers // 2)
        return {name: values for name, values in found.items() if 2 <= len(values) <= most}

    def audit(self) -> Audit:
        """Return the results."""
        names = list(self.log.alternatives)
        chosen = self.log.chosen or (names[0] if names else "")
        n_truth = self.truth[1]
        benchmark = self.options.as_published
        return Audit(
            kind=self.log.kind,
            file=self.log.path.name,
            part="" if self.part is None else self.part,
            chosen=chosen,
            others=tuple(name for name in names if name != chosen),
            n_answers=self.n_answers,
            n_documents=self.documents.n,
            n_options=(self.fewest, self.layout.width),
            n_bins=self.options.n_bins,
            nll_of_truth=-self.truth[0] / n_truth if n_truth else math.nan,
            counts=dict(self.counts),
            confidences=self._audited(),
            fields=self.log.fields,
            pooled={name: len(values) for name, values in self.pooled.items()},
            notes=tuple(self._notes()),
            published=None if benchmark is None else published(benchmark, *self.stated),
        )

    def _notes(self) -> Iterator[str]:
        if not self.definitions and not self.problems:
            yield (
                "The log contains no confidence of an answer that is known to be right or wrong. "
                f"Its calibration cannot be measured. {self.log.advice}".rstrip()
            )
        for name, values in self.pooled.items():
            some = listed([*map(str, sorted(values, key=str)[:5]), *["others"] * (len(values) > 5)])
            yield (
                f"`{name}` has {len(values)} values ({some}), which are pooled. Pass by={name!r} "
                f"(--by {shlex.quote(name)}) to report each apart."
            )
        if self.layout.repeats:
            yield "Questions have several answers. Tests and intervals treat only different questions as independent."

    def fits(self, block: Block) -> bool:
        """Return True if a block agrees with the layout, and adapt the layout. If not, the log must be read again."""
        known = self.layout
        has_texts = block.with_texts
        is_repeated = self.documents.add(block.questions if known.has_repeated_names and has_texts else block.documents)
        scales = {**known.scales}
        for source, stated in block.stated.items():
            before = known.scales.get(source, Scale(self.options.scale))
            scales[source] = before.including_all(np.asarray(stated.values), np.asarray(stated.signs))
        sizes = [np.asarray(scores.sizes) for scores in block.scores.values()]
        self.layout = replace(
            known,
            width=max([known.width, *(int(each.max()) for each in sizes)]),
            has_repeated_names=known.has_repeated_names or is_repeated,
            repeats=known.repeats or (is_repeated and known.has_repeated_names and has_texts),
            scales=scales,
        )
        if self.layout.width > _MAX_OPTIONS:
            n, row = next(
                (n, row)
                for scores in block.scores.values()
                for n, row in zip(scores.sizes, scores.rows, strict=True)
                if n > _MAX_OPTIONS
            )
            raise InputError(
                f"`{self.log.path}` must have at most {_MAX_OPTIONS:,} options in each answer, got {n:,} for document "
                f"{shown(block.documents[row])}. Keep the options of the question only."
            )
        is_contradicted = self.layout.width > known.width or any(
            scales[source].name != before.name for source, before in known.scales.items()
        )
        found, expected = ((each.has_repeated_names, each.repeats) for each in (self.layout, known))
        self.is_contradicted |= found != expected or (is_contradicted and self.n_answers > 0)
        if sizes:
            self.fewest = min(self.fewest or self.layout.width, *(int(each.min()) for each in sizes))
        return not self.is_contradicted

    def _count(self, block: Block) -> None:
        """Add the numbers of answers that are right or wrong, and of those without a distribution over options."""
        truth, right = np.asarray(block.truth), np.asarray(block.right)
        self.n_judged += int((~np.isnan(np.asarray(block.correct))).sum())
        self.truth[0] += float(np.nansum(truth))
        self.truth[1] += int((~np.isnan(truth)).sum())
        has_options, is_single = np.zeros((2, len(block)), dtype=bool)
        for scores in block.scores.values():
            rows = np.asarray(scores.rows)
            has_options[rows] = True
            is_single[rows] |= np.asarray(scores.sizes) == 1
        reasons = {
            "no right option": has_options & (right == NONE),
            "several right options": has_options & (right == SEVERAL),
            "a single option": is_single & (right >= 0),
        }
        for reason, which in reasons.items():
            if which.any():
                self.omitted[f"options without an event: {reason}"] += int(which.sum())

    def _columns(self, block: Block) -> Iterator[ConfidenceColumn]:
        """Yield the confidences of each definition in a block."""
        for source, scores in block.scores.items():
            for part in _parts_of(block, scores, self.layout.width):
                yield from self._columns_of_options(source, scores.is_log, part, block)
        confidences = {
            source: (np.asarray(each.rows), np.asarray(each.values)) for source, each in block.confidences.items()
        }
        correct = np.asarray(block.correct)
        for source, (rows, values) in {**confidences, **self._stated(block)}.items():
            is_judged = ~np.isnan(correct[rows])
            if is_judged.any():
                rows, values = rows[is_judged], values[is_judged]
                target = torch.from_numpy(correct[rows]).long()
                yield ConfidenceColumn(source, "answer", rows, torch.from_numpy(values), target)

    def _stated(self, block: Block) -> dict[str, tuple[Array, Array]]:
        """Return the rows of stated confidences, and their values in [0, 1], by source. Keep those for a benchmark."""
        correct = np.asarray(block.correct)
        is_judged, last = ~np.isnan(correct), np.full(len(block), math.nan)
        found = {}
        for source in self.log.stated:
            if source not in block.stated:
                continue
            rows, values, signs = map(np.asarray, block.stated[source])
            scale = self.layout.scales[source]
            if not scale.problem:
                last[rows] = values = scale.fractions(values, signs)
                found[source] = rows, values
            elif is_judged[rows].any():
                self.problems[source] = scale.problem
        if self.options.as_published is not None:
            self.stated[0].extend(last[is_judged])
            self.stated[1].extend(correct[is_judged])
        return found

    def _columns_of_options(
        self, source: str, is_log: bool, part: tuple[Any, ...], block: Block
    ) -> Iterator[ConfidenceColumn]:
        """Yield the chosen option of each answer and, with `with_each`, each of its options."""
        rows, sizes, values, target = part
        lowest = -math.inf if is_log else 0.0
        held = torch.arange(self.layout.width, device="cpu") < sizes.unsqueeze(1)
        if bool(held.all()):  # the options of all answers are a matrix
            scores = values.reshape(held.shape)
        else:
            scores = torch.full(held.shape, lowest, dtype=torch.float64, device="cpu")
            scores[held] = values
        is_impossible = (scores == lowest).all(-1)
        if bool(is_impossible.any()):
            document = block.documents[rows[int(is_impossible.long().argmax())]]
            raise InputError(
                f"`{self.log.path}` must have an option with a positive probability in each answer, got none for "
                f"document {shown(document)} ({CONFIDENCES[source].name}). Check the scores."
            )
        # Scores instead of their probabilities, of which small ones round to 0, and large ones to 1
        preds = scores if is_log else scores / scores.sum(-1, keepdim=True)
        yield ConfidenceColumn(source, "chosen", rows, preds, target, is_log)
        if self.with_each:
            is_right = torch.zeros_like(held).scatter(1, target.unsqueeze(1), True)[held].long()
            of_each = (log_odds(scores) if is_log else preds)[held]
            yield ConfidenceColumn(source, "each", np.repeat(rows, sizes), of_each, is_right, is_log)

    def _is_clustered(self, event: str) -> bool:
        """Return whether confidences of an event are dependent. Exactly one of the options of a question is right."""
        return event == "each" or (self.layout.repeats and event != "most frequent")

    def _add(self, column: ConfidenceColumn, questions: Tensor) -> None:
        """Add confidences to the report of their definition. `questions` has the question of each answer."""
        key = column.source, column.event
        if key not in self.definitions:
            # The event of a forecast, or of one of all options, is not that the model is right.
            is_event = column.source == "forecast" or column.event == "each"
            task: Task = "multiclass" if column.event == "chosen" else "binary" if is_event else "confidence"
            self.definitions[key] = ReportBuilder(
                task=task,
                num_classes=self.layout.width if task == "multiclass" else None,
                from_logits=column.from_logits,
                n_bins=self.options.n_bins,
                with_intervals=self.options.with_intervals and self.with_each,
                # Calibrators of all options are those of the report on the chosen one.
                with_calibration=self.options.with_calibration and self.with_each and column.event != "each",
            )
        clusters = questions[column.rows] if self._is_clustered(column.event) else None
        self.definitions[key].update(column.preds, column.target, clusters=clusters)

    def _audited(self) -> tuple[AuditedConfidence, ...]:
        found = []
        for source, problem in self.problems.items():
            marks = (f"Ambiguous: {problem} Pass `scale`, 'percent' or 'fraction'.",)
            found.append(AuditedConfidence(source=source, event="answer", report=None, marks=marks))
        for key in sorted(self.definitions, key=_place_of):
            same = next((k for k, each in enumerate(found) if self._are_equal(key, (each.source, each.event))), None)
            if same is not None and found[same].report is not None:
                found[same] = replace(found[same], equal=(*found[same].equal, key[0]))
            else:  # degenerate confidences are equal by their values, and not by their definitions
                found.append(self._audited_confidence(*key))
        scales = {source: scale.rule for source, scale in self.layout.scales.items()}
        field = self.log.options.fields.get("confidence", "")
        found = [
            replace(each, scale=scales.get(each.source, ""), field=field if each.source in _REPORTED else "")
            for each in found
        ]
        found.sort(key=lambda each: _place_of((each.source, each.event)))
        wanted = self.options.definition
        if wanted == "reported" and not any(each.source == "reported" for each in found):
            wanted = "forecast" if any(each.source == "forecast" for each in found) else None
        if wanted is None:
            return tuple(found)
        first = [each for each in found if wanted in (each.source, *each.equal)]
        if not first and self.part is None:
            raise InputError(
                f"`confidence` must be a field or a definition in the log, got {shown(wanted)}. Definitions are "
                f"{quoted(each.source for each in found)}."
            )
        return (*first, *(each for each in found if each not in first))

    def _are_equal(self, key: tuple[str, str], other: tuple[str, str]) -> bool:
        """Return whether two sources in a log have the same confidences of an event; stated ones have their own words.

        Probabilities by byte and by character are an example: they are equal for ASCII text.
        """
        if key[1] != other[1] or {key[0], other[0]} & {*_STATED}:
            return False
        states = [self.definitions[each].state()["states"] for each in (key, other)]
        tensors = [[x for parts in state.values() for x in parts if isinstance(x, Tensor)] for state in states]
        return all(map(torch.equal, *tensors))

    def _audited_confidence(self, source: str, event: str) -> AuditedConfidence:
        """Return the results of a definition, without a report if its confidences are degenerate."""
        builder = self.definitions[source, event]
        data = builder.accumulated()
        bins = data.main_bins
        mean, frequency = (float(x.sum()) / data.n for x in (bins.sums[..., 1, :], bins.outcomes))
        audited = AuditedConfidence(source=source, event=event, report=None, mean=mean, frequency=frequency)
        if refusal := degeneracy(source, data):
            return replace(audited, marks=(refusal,))
        # The simulated outcomes are independent.
        detectable = math.nan if self._is_clustered(event) else detectable_ece(bins)
        marks = tuple(_marks(source, event, data, self.n_judged, detectable))
        origin = {"file": self.log.path.name, "confidence": audited.name, "event": audited.happens}
        return replace(audited, report=builder.report(origin), detectable=detectable, marks=marks)


_REPORTED = ("reported", "forecast")


def _place_of(key: tuple[str, str]) -> int:
    """Return the place of a definition in a table."""
    return list(CONFIDENCES).index(key[0])


def _parts_of(block: Block, scores: Scores, width: int) -> Iterator[tuple[Any, ...]]:
    """Yield the answers of a block that have one right option among several, in parts of limited memory.

    A part has the index in the block and the number of options of n answers, the scores of all these options in turn,
    and the index of the right option of each answer.
    """
    rows, sizes, values = map(np.asarray, (scores.rows, scores.sizes, scores.values))
    right = np.asarray(block.right)[rows]
    kept = (right >= 0) & (sizes > 1)
    rows, right, values, sizes = rows[kept], right[kept], values[np.repeat(kept, sizes)], sizes[kept]
    n, ends = _MAX_SCORES // width, np.cumsum(sizes)
    for start in range(0, len(rows), n):
        part = slice(start, start + n)
        columns = sizes[part], values[ends[start] - sizes[start] : ends[part][-1]], right[part]
        yield rows[part], *map(torch.from_numpy, columns)


def detectable_ece(b: BinStats, n_replicates: int = _REPLICATES) -> float:
    """Return the 95% quantile of ECE over simulated outcomes of a calibrated model; see `inference.simulation`."""
    simulation = Simulation(BinCells.from_bins(b), 0, 0, n_replicates)
    simulated = torch.cat([ece_from_bins(some) for some in simulation.statistics()])
    # The smallest value that at most 5% of the replicates and the data itself reach
    return float(simulated.sort().values[math.ceil(0.95 * (n_replicates + 1)) - 1])


def _distinct(data: Data) -> tuple[Tensor, Tensor]:
    """Return the distinct confidences in ascending order, and the number of samples of each."""
    sample = data.samples[data.main_mode].sorted()
    values, index = torch.unique_consecutive(sample.confidence[sample.counted], return_inverse=True)
    return values, torch.zeros_like(values).index_add(0, index, sample.counts[sample.counted].to(values.dtype))


def degeneracy(source: str, data: Data) -> str:
    """Return the reason why the confidences of a source are degenerate, as a sentence; empty if they are not."""
    values, _ = _distinct(data)
    if len(values) > 1:
        return ""
    if values == 1 and source in _OF_TOKENS:
        return (
            "Degenerate: every probability is 1. The log-probabilities seem to be those of sampling at temperature 0, "
            "not of the model. Its calibration cannot be measured."
        )
    frequency = float(data.main_bins.outcomes.sum()) / data.n
    return (
        f"Degenerate: every confidence is {float(values):.6g}. Only its difference from the accuracy, "
        f"{significant(frequency)}, is known."
    )


def _marks(source: str, event: str, data: Data, n_judged: int, detectable: float) -> Iterator[str]:
    """Yield the reasons why the numbers are not what they seem. `n_judged` answers are right or wrong."""
    n, (values, numbers) = int(data.n), _distinct(data)
    if event == "answer" and n < n_judged:
        yield f"{n_judged - n:,} of {n_judged:,} answers have no such confidence, and are left out."
    if detectable > _LARGE:
        yield (
            f"{n:,} answers are too few to find small calibration errors: only an ECE above {detectable:.2f} is "
            "significant."
        )
    times, value = int(numbers.max()), float(values[numbers.argmax()])
    if n >= _FEW and times > _LOW_SHARE * n and event in ("chosen", "answer"):
        why = "a usual number of stated confidences" if source in _STATED else "which may stand for a missing value"
        yield f"{times:,} of {n:,} confidences are exactly {value:.6g}, {why}."
    n_impossible = int(sum(k for k, _ in data.impossible))
    if n_impossible:
        is_rounded = source != "frequency" and data.decimals in (0, 1, 2)
        rounded = " Probabilities are rounded to 2 decimals." if is_rounded else ""
        yield (
            f"NLL is infinite: the probability of {n_impossible:,} outcome{'s' * (n_impossible > 1)} that occurred is "
            "exactly 0."
            f"{rounded} Use the Brier score."
        )
