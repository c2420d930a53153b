"""From predictions to a sample in order, and from that to a value: what KS and CORP have in common."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from torchcalib.core.arguments import (
    Average,
    InputOptions,
    NanPolicy,
    Task,
    check_average,
    check_task,
    count_of_outputs,
    task_read_as,
)
from torchcalib.core.events import Reduction, resolve_reduction
from torchcalib.core.inputs import InputFormat, read_input
from torchcalib.core.predictions import by_replicates
from torchcalib.core.ranked import ExactSample, LogitCells, RankedSample, by_pieces, sample_recipe
from torchcalib.inference.evidence import ErrorTest, Evidence, evidence_of
from torchcalib.metrics.base import StreamingMetric
from torchcalib.metrics.tested import TestedMetric


@dataclass(frozen=True)
class RankedReading:
    """From predictions to a sample in order, and from that to a value.

    Attributes:
        task, reduction, average, resolution, hard_targets: see `binned.BinReading`.
    """

    task: Task
    reduction: Reduction | None = None
    average: Average | None = "macro"
    resolution: int | None = None
    hard_targets: bool = False

    def __post_init__(self) -> None:
        check_task(self.task)
        check_average(self.average, self.resolved_reduction == "classwise")

    @property
    def resolved_reduction(self) -> Reduction:
        """The reduction asked for, or the task's usual one."""
        return resolve_reduction(self.task, self.reduction)

    @property
    def demands(self) -> dict[str, bool]:
        """What the reading demands of input; arguments of `InputFormat`."""
        return {"hard_targets": self.hard_targets, "whole_weights": True}

    def recipe(self, from_logits: bool) -> ExactSample | LogitCells:
        """Return the accumulator specification, for log-odds or for probabilities."""
        return sample_recipe(self.resolved_reduction, self.resolution, from_logits)

    def read(self, from_sample: Callable[[RankedSample], Tensor], sample: RankedSample) -> Tensor:
        """Read the value `(..., *)` of values `(*)` for a series; classes are averaged if asked."""
        values = by_pieces(from_sample, sample)
        return values.mean(sample.score.dim() - 2) if self.averages else values

    @property
    def averages(self) -> bool:
        """Whether the values of classes are averaged."""
        return self.resolved_reduction == "classwise" and self.average is not None


def evaluate(
    from_sample: Callable[[RankedSample], Tensor],
    reading: RankedReading,
    task: Task,
    preds: Tensor,
    target: Tensor,
    options: InputOptions,
) -> Tensor:
    """Read the input, take every sample of it, and read the value."""
    p = read_input(task, preds, target, options, **reading.demands)
    recipe = ExactSample(reading.resolved_reduction)
    return by_replicates(lambda p: reading.read(from_sample, recipe.of(p)), p, recipe.n_events(p)).to(p.dtype)


class RankedMetric(StreamingMetric[RankedSample]):
    """A reading of a sample in order, over a stream.

    The state is all samples: 5 bytes each for float32 (9 for multi-class logits, 8 more with weights). With
    `resolution` it is a sketch of constant size.

    Args:
        task, num_classes, num_labels, from_logits, ignore_index, positive_classes, class_axis, validate_args,
            nan_policy: see `BinnedMetric`.
        reduction, average, batch_shape, resolution: see `BinnedMetric`.
        **kwargs: those of `torchmetrics.Metric`.
    """

    from_sample: Callable[[RankedSample], Tensor]
    """The value of one series, read off its sample."""

    perfect = 0.0
    unit = "probability"
    plot_lower_bound: float | None = 0.0
    plot_upper_bound: float | None = 1.0
    hard_targets: ClassVar[bool] = False
    """Whether the reading counts labels."""

    def __init__(
        self,
        *,
        task: Task,
        num_classes: int | None = None,
        num_labels: int | None = None,
        from_logits: bool = False,
        reduction: Reduction | None = None,
        average: Average | None = "macro",
        ignore_index: int | None = None,
        positive_classes: Sequence[int] | None = None,
        class_axis: int = -1,
        batch_shape: tuple[int, ...] = (),
        validate_args: bool = True,
        nan_policy: NanPolicy = "raise",
        resolution: int | None = None,
        **kwargs: Any,
    ) -> None:
        read_as = task_read_as(task, {"positive_classes": positive_classes})
        reading = RankedReading(read_as, reduction, average, resolution, self.hard_targets)
        super().__init__(
            InputFormat(
                task,
                from_logits=from_logits,
                ignore_index=ignore_index,
                positive_classes=positive_classes,
                class_axis=class_axis,
                num_classes=count_of_outputs(task, num_classes, num_labels),
                validate_args=validate_args,
                nan_policy=nan_policy,
                **reading.demands,
            ),
            reading.recipe(from_logits),
            batch_shape,
            **kwargs,
        )
        self.reading = reading

    def _value(self, statistic: RankedSample) -> Tensor:
        return self.reading.read(self.from_sample, statistic)


class TestedRankedMetric(RankedMetric, TestedMetric[RankedSample]):
    """A reading of a sample in order that is an error of calibration; arguments as of `RankedMetric`."""

    has_interval: ClassVar[bool] = True
    """Whether `evidence` looks for an interval, for which some two thousand replicates are read."""

    def without_noise(self, sample: RankedSample) -> Tensor:
        """The error of one series whose outcomes are frequencies, and no labels."""
        return self.from_sample(sample)

    def evidence_from(self, statistic: RankedSample, *, with_interval: bool = True, **how: Any) -> Evidence:
        """Return the evidence of a statistic such as this metric's, which may have further axes in front."""
        test = ErrorTest(
            partial(by_pieces, self.from_sample),
            without_noise=partial(by_pieces, self.without_noise),
            signed=self.is_signed,
            with_interval=with_interval and self.has_interval,
        )
        return evidence_of(test, statistic, average=self.reading.averages, **how)
