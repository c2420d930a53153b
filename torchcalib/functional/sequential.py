"""Sequential test of calibration: evidence that holds at every look at a stream of forecasts."""

import json
import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from torchcalib.core.arguments import (
    Average,
    InputOptions,
    Task,
    check_average,
    check_flag,
    is_number,
    task_read_as,
)
from torchcalib.core.events import Mode, resolve_mode
from torchcalib.core.inputs import input_format_of
from torchcalib.core.predictions import Predictions, by_replicates
from torchcalib.core.sums import Sums
from torchcalib.display.words import p_words
from torchcalib.functional.estimator import Declaration, Estimator, tuple_function
from torchcalib.inference.sequential import (
    CHUNK,
    DIRECTIONS,
    LogRatioAccumulator,
    SequentialState,
    SequentialSums,
    direction_of,
    log_evidence,
)
from torchcalib.io.errors import shown


class SequentialEvidence(NamedTuple):
    """Evidence against calibration after all looks; see `sequential_test`. All fields are tensors `(...)`.

    Attributes:
        log_e: Logarithm of the e-value E after the last look, in nats. E is the capital of a gambler who
            starts with 1 and bets against the forecasts. It is 1 on average for a calibrated model. NaN without data.
        log_max: Largest `log_e` at any look, at least 0.
        p_value: Anytime-valid p-value, 1 / max E: P(p <= a at any look) <= a for a calibrated model. NaN with
            `restart`, whose evidence has no p-value.
        since: Number of the first look with E >= 1 / level, counted from 1; 0 for none.
        direction_index: Index of `direction` in `torchcalib.inference.sequential.DIRECTIONS`; -1 for none.
        n: Number of rows; for averages over labels the largest number of a label.

    Example:
        >>> found = sequential_test(torch.full((200,), 0.5), torch.arange(200) % 4 == 0, task="binary")
        >>> found.direction, bool(found.alarm(0.01)), int(found.since)
        ('too high', True, 60)
        >>> print(found)
        too high: log e 21.6 after 200 rows, p < 0.001, alarm since look 60
    """

    log_e: Tensor
    log_max: Tensor
    p_value: Tensor
    since: Tensor
    direction_index: Tensor
    n: Tensor

    @property
    def direction(self) -> Any:
        """Kind of miscalibration: the direction of the components with the most evidence.

        `"too low"` or `"too high"`: the probability of the event. `"over-confident"`: probabilities are too near to 0
        and 1. `"under-confident"`: they are too near to 1/2. `"none"` without evidence, or if it is infinite. For the
        top label, `"too high"` is over-confident, and `"too low"` under-confident. A nested list of texts for tensors
        with axes.
        """
        return _named(self.direction_index.tolist())

    def alarm(self, level: float) -> Tensor:
        """Return whether E >= 1 / level at any look, bool `(...)`. See `sequential_test` for the level."""
        check_alarm_level(level)
        return self.log_max >= -math.log(level)

    def flat(self) -> dict[str, float]:
        """Return plain numbers by name, for loggers; with axes, names end in the index, as in `"log_e/0"`."""
        found: dict[str, float] = {}
        for name, values in self._numbers().items():
            columns = [x if name in ("log_e", "p_value") else int(x) for x in values.flatten().tolist()]
            found |= {name: columns[0]} if values.dim() == 0 else {f"{name}/{k}": x for k, x in enumerate(columns)}
        return found

    def _numbers(self) -> dict[str, Tensor]:
        alarm = self.since > 0
        return {"log_e": self.log_e, "p_value": self.p_value, "alarm": alarm, "since": self.since, "n": self.n}

    def prometheus(self, **labels: str) -> str:
        """Return the numbers in the text format of Prometheus, for an HTTP endpoint or the textfile collector.

        Args:
            **labels: Labels of the time series, such as the name of the model. With axes, the label `output` is the
                index.
        """
        lines = []
        for name, values in self._numbers().items():
            lines += [f"# HELP torchcalib_{name} {_METRICS[name]}", f"# TYPE torchcalib_{name} gauge"]
            for k, value in enumerate(values.double().flatten().tolist()):
                given = labels if values.dim() == 0 else {**labels, "output": str(k)}
                pairs = ",".join(f"{key}={json.dumps(text, ensure_ascii=False)}" for key, text in given.items())
                number = str(value).replace("inf", "+Inf").replace("-+", "-").replace("nan", "NaN")
                lines.append(f"torchcalib_{name}{{{pairs}}} {number}" if pairs else f"torchcalib_{name} {number}")
        return "\n".join(lines) + "\n"

    def __str__(self) -> str:
        """Return one line of text for each test."""
        if self.log_e.dim():
            parts = (type(self)(*parts) for parts in zip(*self, strict=True))
            return "\n".join(f"[{k}] {part}".replace("\n", "\n    ") for k, part in enumerate(parts))
        words, alarm = "", "no alarm"
        if self.since > 0:
            kind = self.direction if self.log_e < math.inf else "an outcome of probability 0 occurred"
            words, alarm = f"{kind}: ", f"alarm since look {int(self.since):,}"
        p_value = "" if self.p_value.isnan() else f", p {p_words(float(self.p_value), equals='= ')}"
        return f"{words}log e {float(self.log_e):.3g} after {int(self.n):,} row{'s' * (self.n != 1)}{p_value}, {alarm}"


_METRICS = {
    "log_e": "Logarithm of the e-value against calibration, in nats.",
    "p_value": "Anytime-valid p-value of calibration.",
    "alarm": "1 if the evidence has reached its level, else 0.",
    "since": "Number of the first look with an alarm, 0 for none.",
    "n": "Number of rows.",
}
"""Names of the numbers in the format of Prometheus, with their descriptions."""


def _named(index: Any) -> Any:
    if isinstance(index, list):
        return [_named(each) for each in index]
    return DIRECTIONS[int(index)] if index >= 0 else "none"


def check_alarm_level(level: object) -> None:
    """Raise an error unless `level` is in (0, 0.5]. A confidence level such as 0.95 is a mistake."""
    if not is_number(level):
        raise TypeError(f"`level` must be a number, got {shown(level)}. A usual level is 0.01.")
    if not 0 < level <= 0.5:
        raise ValueError(
            f"`level` must be above 0 and at most 0.5, got {shown(level)}. It is the probability of a false alarm, for "
            "example 0.01."
        )


@dataclass(frozen=True, eq=False)
class SequentialEstimator(Estimator[Sums]):
    """Estimator of the evidence against calibration."""

    accumulator: LogRatioAccumulator

    def __call__(self, preds: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the fields of `SequentialEvidence` `(..., 6)`, with a look after each row."""
        p = self.read(preds, target, weights)
        return by_replicates(self.of_rows, p, self.accumulator.n_events(p)).to(p.dtype)

    def of_rows(self, p: Predictions) -> Tensor:
        """Return the fields of `SequentialEvidence` `(..., 6)` for predictions, with a look after each row."""
        how, number = self.accumulator, 1
        found: SequentialSums | None = None
        for columns in how.columns(p, CHUNK):
            found = (found or SequentialSums.empty(how, columns)).after(how, columns, number)
            number += columns.shape[-1]
        assert found is not None  # there is at least one chunk, which may be empty
        return self.fields(found)

    def fields(self, statistic: SequentialSums) -> Tensor:
        """Return the fields of `SequentialEvidence` on the last axis, `(..., 6)`."""
        log_e, log_max = self.value(statistic), statistic.log_max
        p_value = torch.full_like(log_max, torch.nan) if self.accumulator.restart else (-log_max).exp()
        direction = direction_of(statistic.sums[..., 1:, 0], self.averages)
        n = self._n(statistic)
        return torch.stack((log_e, log_max, p_value, statistic.since.to(log_e), direction.to(log_e), n), -1)

    def value(self, statistic: Sums) -> Tensor:
        """Return the logarithm of the evidence `(...)`; NaN without data."""
        log_e = log_evidence(statistic.sums[..., 1:, 0], self.averages)
        return log_e.masked_fill(self._n(statistic) == 0, torch.nan)

    def _n(self, statistic: Sums) -> Tensor:
        """Return the number of rows `(...)`."""
        return statistic.total.amax(-1) if self.averages else statistic.total

    def state_kind(self, batch_shape: tuple[int, ...] = ()) -> SequentialState:
        """Return the operations on the state of a stream, in which each update is a look."""
        of_one = self.accumulator.shape(self.input_format.read_as, self.input_format.num_classes)
        return SequentialState(self.accumulator, (*batch_shape, *of_one))


def _log_e(sums: Sums) -> Tensor:
    """Return the logarithm of the evidence of each class or label."""
    return log_evidence(sums.sums[..., 1:, 0], averages=False)


@tuple_function(
    SequentialEvidence,
    Declaration(
        name="Sequential test",
        question="evidence against calibration that holds at every look at a stream",
        source="Arnold, Henzi, Ziegel, Annals of Applied Statistics 2023, arXiv 2109.11761; Shin, Ramdas, Rinaldo, "
        "arXiv 2203.03532",
        unit="nats",
        perfect=0.0,
        allows_clusters=False,  # `SequentialTest.update` accepts clusters
    ),
)
def sequential_test(
    task: Task | None = None,
    *,
    level: float = 0.01,
    restart: bool = False,
    mode: Mode | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> SequentialEstimator:
    """Test the calibration of a stream of forecasts, with evidence that holds at every look.

    A p-value of one look is too often small if it is computed again and again while data arrive. The evidence E is
    valid at every look: P(E >= 1 / level at any look) <= `level` for a calibrated model. Neither the number of looks
    nor the rule for stopping changes this bound. `SequentialTest` has the same evidence for batches, in constant
    memory.

    E is the mean of 16 products of likelihood ratios. Each compares recalibrated forecasts sigmoid(a + b logit p) with
    the forecasts p. Either a or log b is 0.1, 0.2, 0.4 or 0.8 with either sign, and the other is 0.

    Calibration given the past is assumed: given all earlier rows, the mean of an outcome is its forecast. Rows must
    therefore be in the order in which outcomes became known. Rows whose outcomes arrive late belong where they arrive,
    unless the delay depends on the outcome: fraud may be found sooner than its absence. In a batch, outcomes must be
    independent given the forecasts.

    An outcome of a forecast of exactly 0 or 1 that does not occur is infinite evidence. Rounded probabilities of 1 are
    therefore a risk: pass logits, which do not saturate.

    A long time of good calibration makes E small, so that a later change is found late. `restart=True` detects changes:
    its evidence is the sum of the e-processes that start at each look. The mean number of looks until a false alarm is
    then at least 1 / `level`. After an alarm, and after a recalibration, begin a new test.

    Args:
        level: Probability of a false alarm at any look, for `since`. With `restart`, the inverse of the mean number of
            looks until a false alarm.
        restart: Detect changes instead of testing all rows together.
        mode: Event whose probability is the confidence; see `ece`. For several classes or labels, each is tested.
        average: `"macro"` averages the evidence of classes or labels, which is also valid. None returns each; an alarm
            of any of K then has the level K times `level`.

    Returns:
        A `SequentialEvidence` with a look after each row: tensors `(...)`, or `(..., C)` with `average=None`. Their
        dtype is that of `preds` (at least float32). Integer weights count rows with the same forecast and outcome.

    Raises:
        TypeError, ValueError: for invalid input, and for weights that are not whole numbers.

    Gradient:
        None.

    Reference:
        Arnold, Henzi, Ziegel: Sequentially valid tests for forecast calibration (Annals of Applied Statistics 2023,
        arXiv 2109.11761). Ville: Etude critique de la notion de collectif (1939), for the level. Shin, Ramdas, Rinaldo:
        E-detectors (arXiv 2203.03532), for `restart`.

    Example:
        >>> g = torch.Generator().manual_seed(0)
        >>> logits = 2 * torch.randn(500, generator=g)
        >>> target = torch.bernoulli((logits / 2).sigmoid(), generator=g).long()  # over-confident by a factor of 2
        >>> found = sequential_test(logits, target, task="binary", from_logits=True)
        >>> found.direction, bool(found.p_value < 0.01)
        ('over-confident', True)
    """
    check_alarm_level(level)
    check_flag("restart", restart)
    mode = resolve_mode(task_read_as(task, options), mode)
    averages = check_average(average, mode == "classwise")
    accumulator = LogRatioAccumulator(mode, averages, float(level), restart)
    return SequentialEstimator(input_format_of(task, options, whole_weights=True), accumulator, _log_e, averages)
