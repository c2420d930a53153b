"""Intervals of functions, from a few replicates at a time."""

import math
import typing
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from torchcalib.core.arguments import InputOptions, Task, check_count, check_level, check_seed
from torchcalib.core.inputs import read_input
from torchcalib.core.predictions import replicates_at_once
from torchcalib.inference.interval import Interval
from torchcalib.inference.resampling import Resampling


def bootstrap(
    metric: Callable[..., Any],
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    n_replicates: int = 1000,
    level: float = 0.95,
    seed: int = 0,
    groups: Tensor | None = None,
    weights: Tensor | None = None,
    **options: Any,
) -> Any:
    """Percentile bootstrap interval of a metric.

    As many samples as there are, drawn with replacement, are a replicate; the metric is computed of each, and the
    interval reaches from the `(1 - level) / 2` quantile of its values to the `(1 + level) / 2` quantile. Leading axes
    of `preds` are series of the same samples, models say, which are drawn for all of them alike. Calibration losses
    fit their calibrator anew in every replicate, and all copies of a sample are in one fold.

    The interval is one of the value that the data have, with the bias that it has: see `Interval.bias` for the binned
    errors, which are too high. For calibration losses it covers the choice of data, not the deal into folds.

    Args:
        metric: a function of torchcalib such as `ece`, `partial(rcl, score="brier")`, or another one that is called as
            `metric(preds, target, task=task, weights=weights, **options)` and returns `(R, ...)` for weights
            `(R, ..., N)`. It may return a named tuple of such tensors.
        preds: binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`, as for the metric.
        target: as for the metric.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        n_replicates: R.
        level: in (0, 1).
        seed: of the draws, which are the same on every device.
        groups: integers `(N,)`; samples of equal number (a patient, a video) are drawn together, and share a fold.
        weights: `(..., N)`; a sample has its weight each time it is drawn.
        **options: those of the metric.

    Returns:
        An `Interval` of `(...)`; for a named tuple one of its kind, of intervals. Samples that weight 0 or
        `ignore_index` leave out are not drawn. Memory is that of the predictions and of some 2^22 weights.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Gradient:
        None.

    Source:
        Efron, Tibshirani: An Introduction to the Bootstrap (1993), ch. 13.3; [EPSR] Ferrer, Ramos: Evaluating
        Posterior Probabilities (TMLR), for calibration losses.

    Example:
        >>> from torchcalib import brier_score
        >>> preds, target = torch.tensor([0.9, 0.8, 0.3, 0.6, 0.2]), torch.tensor([1, 1, 0, 0, 1])
        >>> found = bootstrap(brier_score, preds, target, task="binary")
        >>> [round(x.item(), 3) for x in (found.low, found.value, found.high)]
        [0.038, 0.228, 0.464]
    """
    check_count("n_replicates", n_replicates)
    check_level(level, n_replicates)
    check_seed(seed)
    if not callable(metric):
        raise TypeError(f"`metric` must be a function such as torchcalib.ece, got {metric!r}.")
    names = InputOptions.__annotations__
    p = read_input(task, preds, target, {"weights": weights, **{k: v for k, v in options.items() if k in names}})
    if p.replicates:
        raise ValueError(
            f"`weights` must have one value per sample, got shape {tuple(p.weights.shape)}. "  # type: ignore[union-attr]
            "Take one way of weighing at a time."
        )
    draws = Resampling(p, seed, groups)
    if groups is not None and _takes(metric, "groups"):
        options["groups"] = groups
    lead = p.samples[:-2] if p.task == "multilabel" else p.samples[:-1]  # of labels there is one weight for all

    def weighed(streams: Tensor) -> Tensor:
        """Weights of replicates `(r, ..., N)`."""
        drawn = draws.counts(streams)
        drawn = drawn.reshape(len(streams), *[1] * len(lead), p.samples[-1]).expand(-1, *lead, -1)
        return drawn if weights is None else drawn * weights

    with torch.no_grad():
        value = metric(preds, target, task=task, weights=weights, **options)
        streams = torch.arange(n_replicates, device=preds.device)
        found = []
        for some in torch.split(streams, replicates_at_once(math.prod(lead) * p.samples[-1])):
            found.append(metric(preds, target, task=task, weights=weighed(some), **options))
            _check_values(found[-1], value, len(some))
    if isinstance(value, tuple):
        parts = [torch.cat(part) for part in zip(*found, strict=True)]
        intervals: list[Any] = [Interval(v, part, level) for v, part in zip(value, parts, strict=True)]
        return type(value)(*intervals) if hasattr(value, "_fields") else tuple(intervals)
    return Interval(value, torch.cat(found), level)


def _takes(metric: Callable[..., Any], option: str) -> bool:
    """Whether a function declares an option, by its name or in the typed dict of its keywords."""
    try:
        parameters = signature(metric).parameters.values()
    except ValueError:  # a builtin that tells none
        return False
    for parameter in parameters:
        kinds = typing.get_args(parameter.annotation)  # of Unpack[CalibrationOptions]
        if parameter.name == option or any(option in getattr(kind, "__annotations__", ()) for kind in kinds):
            return True
    return False


def _check_values(values: Any, value: Any, n: int) -> None:
    """Raise if a metric has not taken weights `(n, ..., N)` for n values."""
    whole, parts = (value, values) if isinstance(value, tuple) else ((value,), (values,))
    for one, several in zip(whole, parts, strict=True):
        if not isinstance(one, Tensor) or not isinstance(several, Tensor):
            raise TypeError(f"`metric` must return a tensor, or a named tuple of tensors, got {type(one).__name__}.")
        if not several.is_floating_point():
            raise TypeError(f"`metric` must return floating values, got {several.dtype}. Convert them with .double().")
        if several.shape != (n, *one.shape):
            raise ValueError(
                f"`metric` must return {(n, *one.shape)} for weights of {n} replicates, got {tuple(several.shape)}. "
                "Let it take weights with a leading axis, as the functions of torchcalib do."
            )
