"""Maximum likelihood fits of softmax(a * s + b) to batches, of which only sums are stored."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from torchcalib.calibration.calibrator import Calibrator
from torchcalib.core.arguments import Task
from torchcalib.core.inputs import input_format_of
from torchcalib.core.predictions import Predictions
from torchcalib.core.tasks import prepare
from torchcalib.io.errors import shown
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.newton import AT_ZERO, CONVERGED, NO_DATA, SEPARABLE, STOPPED
from torchcalib.ops.newton.descent import (
    DECREMENT,
    GRADIENT,
    Iterate,
    Step,
    Value,
    damped_newton,
    is_within_rounding,
    newton_direction,
    without_constant,
)

_PIECE = 2**19  # number of scores that are converted to float64 at a time


class _FitSums(NamedTuple):
    """Sums over rows for S fits, whose parameters are scales a and biases b, `(S, 2 C)`."""

    f: Tensor  # negative log-likelihood `(S,)`
    gradient: Tensor  # `(S, 2 C)`
    hessian: Tensor  # `(S, 2 C, 2 C)`
    n: Tensor  # weight of each class `(S, C)`, in rows with at least two possible classes
    lost: Tensor  # weight of labels with probability 0 `(S,)`
    least: Tensor  # smallest positive weight `(S,)`


class BatchFitMixin(Calibrator):
    """Calibrators softmax(a * s + b) of scores s, which can be fitted to batches."""

    free: ClassVar[tuple[bool, bool, bool]]
    """Whether there is a free scale, whether each class has its own, and whether there are free biases."""

    def fit_batches(
        self,
        batches: Iterable[Any],
        task: Task | None = None,
        *,
        from_logits: bool | None = None,
        **options: Any,
    ) -> Self:
        """Fit the calibrator to batches, such as volumes, without storing predictions. The result is that of `fit`.

        Each Newton step reads all batches once, which takes 5 to 15 passes. Only sums are stored. A model that computes
        predictions runs in every pass. If that is slow, save its logits.

        Separable data are detected if every label becomes the most probable class. The parameters are then those of
        unchanged predictions.

        Args:
            batches: Tuples `(preds, target)` or `(preds, target, weights)`, in an object that can be iterated several
                times: a list, a data loader, or another object with `__iter__`. A generator can be read only once.
            task: `"binary"`, `"multiclass"` or `"multilabel"`. None infers it from the first batch.
            from_logits: `preds` are logits. None decides by the constructor or the first batch; see `fit`.
            **options: Other options of `torchcalib.functional.InputOptions`, such as `ignore_index` and `class_axis`.

        Returns:
            The calibrator itself.

        Raises:
            TypeError, ValueError: for invalid input, without batches, or if the batches can be read only once.

        Warns:
            UserWarning: see `fit`.

        Example:
            >>> from torchcalib import TemperatureScaling
            >>> logits = [3 * torch.randn(2, 4, 8, 8, 8) for _ in range(3)]
            >>> volumes = [(z, (z + torch.randn_like(z)).argmax(1)) for z in logits]
            >>> calibrator = TemperatureScaling().fit_batches(volumes, from_logits=True)
            >>> calibrator(volumes[0][0]).shape
            torch.Size([2, 4, 8, 8, 8])
        """
        source = _Batches(self, batches, task, from_logits, options)
        with torch.no_grad(), torch.inference_mode(False):
            fitted = self._with_buffers(self._fitted_to(source))
        fitted.task, fitted.class_axis = source.task, source.class_axis
        fitted.from_logits = bool(source.options["from_logits"])
        fitted.positive_classes = None
        return self.adopt(fitted)

    @abstractmethod
    def buffers_of(self, a: Tensor, b: Tensor, absent: Tensor) -> dict[str, Tensor]:
        """Return the parameters by name, from scales and biases `(..., C)`; `absent` are classes without samples."""

    def _fitted_to(self, source: "_Batches") -> dict[str, Tensor]:
        with_scale, by_class, with_bias = self.free
        whole = source.sums(None)
        n_fits, n_classes = whole.n.shape
        total = whole.n.sum(-1)
        absent = (whole.n == 0) & (total > 0).unsqueeze(-1) & with_bias
        eye = torch.eye(n_classes, dtype=total.dtype, device=total.device)
        zero = torch.zeros_like(eye)
        # Rows of `design` are free parameters, columns are scales and biases.
        scales = torch.cat((eye, zero), 1) if by_class else torch.cat((eye, zero), 1).sum(0, keepdim=True)
        design = torch.cat(([scales] if with_scale else []) + ([torch.cat((zero, eye), 1)] if with_bias else []))
        is_bias = design[:, n_classes:].sum(-1)
        start = torch.cat((torch.ones_like(whole.n), torch.zeros_like(whole.n)), 1)

        def value_of(sums: _FitSums) -> Value:
            n = total[:, None]
            gradient = (sums.gradient / n) @ design.T
            hessian = design @ (sums.hessian / n[..., None]) @ design.T
            return Value(sums.f / total, gradient, gradient.norm(dim=-1), (hessian,))

        def evaluate(theta: Tensor) -> Value:
            return value_of(source.sums(start + theta @ design, absent))

        bound = whole.least / total * math.log(2)  # see `separation_bound`

        def newton_step(now: Iterate) -> Step:
            (hessian,), value = now.value.parts, now.value
            moves = is_bias * (hessian.diagonal(dim1=-2, dim2=-1) > 0)
            trace = (hessian.diagonal(dim1=-2, dim2=-1) * is_bias).sum(-1)
            if with_bias:
                hessian = without_constant(hessian, moves, trace)
            p = newton_direction(hessian, value.gradient)
            slope = (p * value.gradient).sum(-1)
            return Step(p, slope, (value.norm <= GRADIENT) & (slope >= -DECREMENT) | (value.f < bound))

        theta = start.new_zeros(n_fits, len(design))
        value = None if bool(absent.any()) else value_of(whole)
        found = damped_newton(theta, evaluate, newton_step, ~(total > 0), value=value)
        a, b = torch.split(start + found.theta @ design, n_classes, 1)
        norm, slope = found.value.norm, found.step.slope
        done = (norm <= GRADIENT) & (slope >= -DECREMENT) | is_within_rounding(norm, slope)
        outcome = torch.where(done, CONVERGED, STOPPED)
        is_single = with_bias & (absent.sum(-1) == n_classes - 1)
        separable = (found.value.f < bound) & ~is_single
        at_zero = (a[:, 0] <= 0) & ~separable & with_scale if not by_class else torch.zeros_like(separable)
        outcome = outcome.masked_fill(separable, SEPARABLE).masked_fill(at_zero, AT_ZERO)
        outcome = outcome.masked_fill(is_single, CONVERGED).masked_fill(~(total > 0), NO_DATA)
        unchanged = (separable | is_single).unsqueeze(-1)
        a = a.masked_fill(at_zero.unsqueeze(-1), 0).masked_fill(unchanged, 1)
        b = torch.where(at_zero.unsqueeze(-1) & with_bias, whole.n.log(), b).masked_fill(absent, torch.nan)
        b = (b - b.nanmean(-1, keepdim=True)).masked_fill(absent | unchanged, 0)
        none = ~(total > 0)
        a, b = (x.masked_fill(none.unsqueeze(-1), torch.nan) for x in (a, b))
        norm = norm.masked_fill(at_zero, 0).masked_fill(separable | none, torch.nan)
        buffers = {**self.buffers_of(a, b, absent), "lost": whole.lost, "outcome": outcome, "grad_norm": norm}
        buffers["converged"] = (outcome == CONVERGED) | (outcome == AT_ZERO)
        return buffers if source.task == "multilabel" else {name: x.squeeze(0) for name, x in buffers.items()}


class _Batches:
    """Batches of predictions, from which sums for given parameters are computed."""

    def __init__(
        self, calibrator: Calibrator, batches: Iterable[Any], task: Task | None, from_logits: bool | None, options: Any
    ) -> None:
        self.calibrator, self.batches, self.task = calibrator, batches, task
        self.options = {**options, "from_logits": from_logits}
        if options.get("positive_classes") is not None:
            raise ValueError(
                f"`positive_classes` must be None for batches, got {shown(options['positive_classes'])}. Use fit."
            )
        if isinstance(batches, Iterator):
            raise TypeError(
                f"`batches` must be iterated several times, got a {type(batches).__name__}. Pass a list, a data loader "
                "or an object with __iter__."
            )
        if calibrator.declared_from_logits is not None and from_logits is None:
            self.options["from_logits"] = calibrator.declared_from_logits
        self.class_axis = -1
        self.is_read = False  # whether the first batch has determined the task and the kind of values

    def read(self) -> Iterator[Predictions]:
        """Yield the checked batches."""
        for batch in self.batches:
            if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
                raise TypeError(
                    f"`batches` must yield (preds, target) or (preds, target, weights), got {shown(batch)}."
                )
            preds, target, *weights = batch
            if not self.is_read:
                given = prepare(
                    preds, target, self.task, from_logits=self.options["from_logits"],
                    ignore_index=self.options.get("ignore_index"),
                )  # fmt: skip
                self.task, self.options["from_logits"] = given.task, given.from_logits
                how = input_format_of(given.task, self.options)
                self.class_axis, self.is_read = how.resolved(given.preds, given.target).axis, True
            options = {**self.options, "weights": weights[0] if weights else None}
            if self.task != "binary" and preds.dim() > 2:
                options["class_axis"] = self.class_axis
            yield self.calibrator.read(preds, target, task=self.task, options=options)  # type: ignore[arg-type]  # known

    def sums(self, parameters: Tensor | None, absent: Tensor | None = None) -> _FitSums:
        """Return the sums over all batches for parameters `(S, 2 C)`; None for scale 1 and bias 0."""
        total: _FitSums | None = None
        for p in self.read():
            for k, (scores, targets, weights) in enumerate(_fits_of(p)):
                n_classes = scores(slice(0, 0)).shape[-1]
                if total is None:
                    n_fits = p.samples[0] if p.task == "multilabel" else 1
                    total = _no_sums(n_fits, n_classes, scores(slice(0, 0)))
                theta = parameters[k] if parameters is not None else None
                unused = None if absent is None else absent[k]
                for start in range(0, p.samples[-1], max(1, _PIECE // n_classes)):
                    rows = slice(start, start + max(1, _PIECE // n_classes))
                    w = None if weights is None else weights[rows]
                    _add(total, k, scores(rows), targets(rows), w, theta, unused)
        if total is None:
            raise ValueError("`batches` must contain at least one batch, got none. Pass (preds, target) tuples.")
        return total


def _no_sums(n_fits: int, n_classes: int, like: Tensor) -> _FitSums:
    zeros = like.new_zeros
    f, lost, least = zeros(n_fits), zeros(n_fits), zeros(n_fits) + torch.inf
    gradient, hessian = zeros(n_fits, 2 * n_classes), zeros(n_fits, 2 * n_classes, 2 * n_classes)
    return _FitSums(f, gradient, hessian, zeros(n_fits, n_classes), lost, least)


Rows = Callable[[slice], Tensor]


def _fits_of(p: Predictions) -> Iterator[tuple[Rows, Rows, Tensor | None]]:
    """Yield, for each fit, functions from a slice of rows to scores and targets `(n, C)`, and the weights `(N,)`."""
    wide = wide_dtype(p.input_preds.device)
    if p.task == "multiclass":
        values = p.values if p.from_logits else p.log_probs

        def targets(rows: slice) -> Tensor:
            if p.soft:
                return p.target[rows].to(wide)
            return torch.nn.functional.one_hot(p.target[rows].long(), p.num_classes).to(wide)

        yield (lambda rows: values[rows].to(wide)), targets, p.weights
        return
    log_p, log_not_p = p.binary_log_probs
    labels = p.target.to(wide)
    for k in range(p.samples[0] if p.task == "multilabel" else 1):
        probs, y, weights = (log_not_p, log_p), labels, p.weights
        if p.task == "multilabel":
            probs, y = (log_not_p[k], log_p[k]), labels[k]
            weights = None if weights is None else weights.expand(p.samples)[k]
        yield partial(_stacked, probs, wide), partial(_stacked, (1 - y, y), wide), weights


def _stacked(columns: Sequence[Tensor], dtype: torch.dtype, rows: slice) -> Tensor:
    """Return some rows of two columns `(N,)`, as the scores or targets of two classes `(n, 2)`."""
    return torch.stack([x[rows].to(dtype) for x in columns], -1)


def _add(
    total: _FitSums, k: int, s: Tensor, y: Tensor, w: Tensor | None, theta: Tensor | None, absent: Tensor | None
) -> None:
    """Add rows with scores s `(n, C)`, target probabilities y and weights w to the sums of fit k, in place."""
    if w is not None:
        used = w > 0
        s, y, w = s[used], y[used], w[used]
        y = y * w.unsqueeze(-1).to(y)
    if len(s):
        total.least[k] = torch.minimum(total.least[k], y.sum(-1).amin())
    excluded = s == -torch.inf
    # Labels of probability 0 have an infinite NLL. Rows with a single possible class have an NLL of 0.
    total.lost[k] += y.masked_fill(~excluded, 0).sum()
    y = y.masked_fill(excluded | ((~excluded).sum(-1, keepdim=True) < 2), 0)
    s = s.masked_fill(excluded, 0)
    n_classes = s.shape[-1]
    z = s if theta is None else theta[:n_classes] * s + theta[n_classes:]
    z = z.masked_fill(excluded if absent is None else excluded | absent, -torch.inf)
    log_q = z.log_softmax(-1)
    q, t = log_q.exp(), y.sum(-1, keepdim=True)
    total.n[k] += y.sum(0)
    total.f[k] -= (y * log_q.masked_fill(y == 0, 0)).sum()
    residual = t * q - y
    total.gradient[k] += torch.cat(((residual * s).sum(0), residual.sum(0)))
    # Let D = t (diag(q) - q q') and S = diag(s). The Hessian in (a, b) is the sum of (S D S, S D; D S, D).
    sq = s * q
    both = torch.cat((sq, q), 1)
    hessian = -(t * both).T @ both
    diagonal = torch.stack(((t * s * sq).sum(0), (t * sq).sum(0), (t * q).sum(0)))
    for (i, j), values in zip(((0, 0), (0, 1), (1, 1)), diagonal, strict=True):
        rows, columns = (torch.arange(n_classes, device=s.device) + n_classes * m for m in (i, j))
        hessian[rows, columns] += values
        if i != j:
            hessian[columns, rows] += values
    total.hessian[k] += hessian
