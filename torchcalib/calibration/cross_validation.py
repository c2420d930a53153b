"""Cross-validated calibration, and calibration with a fit to held-out data or to the same data (optimistic)."""

from collections.abc import Callable, Sequence
from inspect import Parameter, signature
from typing import Any, NamedTuple, TypedDict, TypeVar, Unpack, cast

import torch
from torch import Tensor

from torchcalib.calibration.affine import AffineScaling
from torchcalib.calibration.calibrator import Calibrator, sample_weights
from torchcalib.core.arguments import InputOptions, Task, check_count, check_flag, check_seed
from torchcalib.core.arrays import as_tensor, as_tensors
from torchcalib.core.checks import check_indices
from torchcalib.core.documentation import (
    document,
    input_parameters,
    parameters_of,
    resolving_task,
    with_implied_task,
)
from torchcalib.core.inputs import flattened, input_format_of
from torchcalib.core.predictions import Predictions, by_replicates, in_all_replicates
from torchcalib.ops.host_values import value_if_available

DEFAULT = AffineScaling()

F = TypeVar("F", bound=Callable[..., Any])


class FoldOptions(TypedDict, total=False):
    """Options of the folds of a cross-validation; see `cross_val_calibrate`."""

    n_folds: int
    seed: int
    groups: Tensor | None
    folds: Tensor | None


class CalibrationOptions(FoldOptions, InputOptions, total=False):
    """Options of cross-validated calibration, of its folds and of its input; see `cross_val_calibrate`."""

    train_on_test: bool
    calibration: Sequence[Tensor] | None


_FOLD_DEFAULTS = {"n_folds": 5, "seed": 0, "groups": None, "folds": None}
_DEFAULTS = {**_FOLD_DEFAULTS, "train_on_test": False, "calibration": None}

_ARGUMENTS = """
        target: Integer labels; see `torchcalib.functional.nll`.
        score: `"nll"` (negative log-likelihood), `"brier"`, or a function `score(preds, target, task=..., **options)`
            that is smaller for better predictions. For the Bayes risk pass `partial(bayes_risk, cost=...)`. Calibrators
            always minimise the NLL.
        calibrator: Calibration method; see `torchcalib.calibration`. By default it is cross-validated: each sample is
            calibrated with a fit to the other folds.
        n_folds: Number of folds. They are stratified: the counts of a class in two folds differ by at most one.
        seed: Seed of the random split, which is the same on every device.
        groups: Group numbers, integers `(N,)` or `(..., N)`. All samples of a group, such as a patient or a video, are
            in the same fold. Groups are assigned by decreasing size to the fold with the fewest samples of their
            classes.
        folds: Fold numbers `(N,)` or `(..., N)`, integers, instead of a random split.
        train_on_test: Fit and evaluate on the same data. This is optimistic: it overestimates the gain in NLL by about
            the number of parameters divided by N.
        calibration: Held-out data for the fit, `(preds, target)` or `(preds, target, weights)`, with the same input
            options. Its leading axes are those of `preds`, or none."""


def with_calibration_options(function: F) -> F:
    """Add the options of calibration and input to the signature and docstring of a function."""
    options = [Parameter(name, Parameter.KEYWORD_ONLY, default=default) for name, default in _DEFAULTS.items()]
    returns = signature(function).return_annotation
    function = resolving_task(function)
    parameters = [*with_implied_task(parameters_of(function)), *options, *input_parameters()]
    document(function, function.__doc__, parameters, returns, _ARGUMENTS)
    return function


@with_calibration_options
def cross_val_calibrate(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    calibrator: Calibrator = DEFAULT,
    **options: Unpack[CalibrationOptions],
) -> Tensor:
    """Calibrate predictions by cross-validation: each sample is calibrated with a fit to the other folds.

    Returns:
        Calibrated probabilities (or logits) of the shape of `preds`, in its dtype (at least float32). With
        `positive_classes`, the probability (or log-odds) of the set, without the class axis. Rows with an ignored
        target or weight 0 are undefined. Dropped rows are NaN.

    Warns:
        UserWarning: see `calibration_loss`.

    Gradient:
        With respect to `preds`; the fitted parameters are constants.

    Reference:
        [EPSR] Ferrer, Ramos: Evaluating Posterior Probabilities (TMLR), sec. 2.5.3.

    Example:
        >>> from torchcalib.calibration import TemperatureScaling
        >>> preds, target = torch.tensor([0.9, 0.8, 0.9, 0.7, 0.6, 0.8]), torch.tensor([1, 0, 1, 0, 0, 1])
        >>> cross_val_calibrate(preds, target, task="binary", n_folds=3, calibrator=TemperatureScaling()).shape
        torch.Size([6])
    """
    preds, target, _ = as_tensors(preds, target)
    original, how = preds, input_format_of(task, input_options(options))
    axis = how.resolved(preds, target, how.batch_dims).axis
    preds, target, options = flat_options(preds, target, task, options)
    fitting = fitted(preds, target, task, calibrator, options)
    values = as_given(fitting.p, fitting.calibrate(fitting.p), options)
    if task == "binary":
        return values.reshape(original.shape)
    samples = original.movedim(axis, -1).shape[:-1]
    return values.reshape(samples) if fitting.p.task != task else values.reshape(*samples, -1).movedim(-1, axis)


class Fitting(NamedTuple):
    """Checked predictions and the function that calibrates them."""

    p: Predictions
    calibrate: Callable[[Predictions], Tensor]  # maps `p`, or a copy with other weights, to calibrated values
    n_fits: int  # number of fits for each replicate

    def by_replicates(self, value: Callable[[Predictions, Tensor], Tensor]) -> Tensor:
        """Compute `value(predictions, calibrated values)` for a few replicates at a time, which limits the memory."""
        n_values = self.p.given.numel() * (self.n_fits + 1)
        return by_replicates(lambda p: value(p, self.calibrate(p)), self.p, n_values)


def fitted(preds: Tensor, target: Tensor, task: Task, calibrator: Calibrator, options: CalibrationOptions) -> Fitting:
    """Check the input, and return a `Fitting` to other folds, to held-out data, or to the same data."""
    if not isinstance(calibrator, Calibrator):
        raise TypeError(f"`calibrator` must be a calibrator such as AffineScaling(), got {calibrator!r}.")
    p = _checked(preds, target, task, calibrator, input_options(options))
    on_test, held_out = options.get("train_on_test", False), options.get("calibration")
    check_flag("train_on_test", on_test)
    if on_test and held_out is not None:
        raise ValueError("`calibration` must be None with train_on_test=True, got both. Choose one to fit to.")
    if on_test or held_out is not None:
        for name in _FOLD_DEFAULTS:
            if options.get(name) is not None:
                other = "train_on_test=True" if on_test else "a `calibration` set"
                raise ValueError(f"`{name}` must be left out with {other}, got {options.get(name)!r}.")
    if held_out is not None:
        fit = calibrator.fit_to(_checked_held_out(held_out, p, calibrator, task, options))
        _with_warning(fit, p)
        return Fitting(p, lambda p: fit.calibrated(p.values, p.from_logits), 1)
    if on_test:
        return Fitting(p, lambda p: _with_warning(calibrator.fit_to(p), p).calibrated(p.values, p.from_logits), 1)
    folds, n_folds = folds_of(p, cast("FoldOptions", options))

    def cross_validated(p: Predictions) -> Tensor:
        values, fits = out_of_fold(p, calibrator, folds, n_folds)
        _with_warning(fits, p)
        return values

    return Fitting(p, cross_validated, n_folds)


def out_of_fold(p: Predictions, calibrator: Calibrator, folds: Tensor, n_folds: int) -> tuple[Tensor, Calibrator]:
    """Calibrate each sample with a fit to the other folds. All fits are computed in one batch.

    Args:
        p: predictions.
        calibrator: calibration method.
        folds: fold of each sample, of the shape of `p.target`.
        n_folds: number of folds F.

    Returns:
        Calibrated values in canonical form, `(..., N)` or `(..., N, C)`, and the fitted calibrators, of batch shape
        `(F, ...)`. With replicates the shapes are `(R, ...)` and `(F, R, ...)`.
    """
    w = sample_weights(p)
    fits = calibrator.fit_to(p, torch.stack([w.masked_fill(folds == f, 0) for f in range(n_folds)]))
    return calibrated_by_fold(p, fits, folds, n_folds), fits


def calibrated_by_fold(p: Predictions, fits: Calibrator, folds: Tensor, n_folds: int) -> Tensor:
    """Return the calibrated values of each sample, from the fit to the other folds; see `out_of_fold`."""
    values = fits.part(0).calibrated(p.values, p.from_logits)
    for f in range(1, n_folds):
        inside = (folds == f).unsqueeze(-1) if p.task == "multiclass" else folds == f
        values = torch.where(inside, fits.part(f).calibrated(p.values, p.from_logits), values)
    return values


def _checked(preds: Tensor, target: Tensor, task: Task, calibrator: Calibrator, options: InputOptions) -> Predictions:
    """Check the input. For `positive_classes`, prefer log-odds, because the probability of the set may round to 1."""
    p = calibrator.read(preds, target, task=task, options=options)
    return p.set_in_log_odds() if calibrator.in_log_odds else p


def _with_warning(fit: Calibrator, p: Predictions) -> Calibrator:
    """Return the fit, and warn if it did not converge, because the true gain of calibration may be larger.

    Fits without data do not warn: their predictions are NaN. Fits to replicates do not warn, because small replicates
    often have no optimum.
    """
    no_data = ~(sample_weights(p).sum(-1) > 0)
    if not p.replicates and value_if_available((fit.converged | no_data).all()) is False:
        fit.warn()
    return fit


def _checked_held_out(
    held_out: Sequence[Tensor], p: Predictions, calibrator: Calibrator, task: Task, options: CalibrationOptions
) -> Predictions:
    """Check the held-out data, and that their classes and leading axes match the predictions `p`."""
    if not isinstance(held_out, tuple | list) or len(held_out) not in (2, 3):
        raise TypeError(
            "`calibration` must be (preds, target) or (preds, target, weights), got "
            f"{type(held_out).__name__}. Put the tensors into a tuple."
        )
    weights = held_out[2] if len(held_out) == 3 else None
    given = input_options(options)
    axes = as_tensor("calibration", held_out[0]).dim() - (task != "binary")
    given = {**given, "weights": weights, "batch_dims": min(given.get("batch_dims", 0), max(0, axes - 1))}
    held = _checked(held_out[0], held_out[1], task, calibrator, given)
    batch, own = p.target.shape[:-1], held.target.shape[:-1]
    labels = p.task == "multilabel"
    if held.num_classes != p.num_classes or own not in (batch, batch[-1:] if labels else batch[:0]):
        raise ValueError(
            f"`calibration` must have the classes of `preds` and its batch axes or none, got shape "
            f"{tuple(held.values.shape)} for `preds` of shape {tuple(p.values.shape)}. Only the sample axis may "
            "differ: it is the last one, or the one before the class axis. Pass data of the same model."
        )
    if held.replicates:
        raise ValueError(
            f"`calibration` must have one weight per sample, got replicate axes {tuple(held.replicates)}. It is fitted "
            "once for all replicates: remove these axes."
        )
    if value_if_available((sample_weights(held).sum(-1) > 0).all()) is False:
        raise ValueError("`calibration` must have samples of positive weight to fit to, got none.")
    return held


def input_options(options: CalibrationOptions) -> InputOptions:
    """Return the options of `InputOptions`, without the options of calibration."""
    return cast("InputOptions", {name: value for name, value in options.items() if name not in _DEFAULTS})


def flat_options(
    preds: Tensor, target: Tensor, task: Task, options: CalibrationOptions
) -> tuple[Tensor, Tensor, CalibrationOptions]:
    """Flatten sample axes into one, and move classes last, in predictions, targets and options; see `flattened`."""
    preds, target, given = flattened(task, preds, target, input_options(options))
    kept: dict[str, Any] = {name: value for name, value in options.items() if name in _DEFAULTS}
    lead = preds.shape[: given.get("batch_dims", 0)]
    for name in ("folds", "groups"):
        if kept.get(name) is not None:
            numbers = as_tensor(name, kept[name], preds.device)
            of_each = numbers.numel() == lead.numel() * preds.shape[len(lead)]
            kept[name] = numbers.reshape(*lead, -1) if of_each else numbers.reshape(-1)
    return preds, target, cast("CalibrationOptions", {**kept, **given})


def as_given(p: Predictions, values: Tensor, options: CalibrationOptions) -> Tensor:
    """Convert calibrated values `(..., N[, C])` to the layout of the flat predictions. Dropped rows become NaN."""
    as_log_odds = p.task == "binary" and p.from_logits and not options.get("from_logits")
    values = (values.sigmoid() if as_log_odds else values).to(p.dtype)
    if p.n_dropped is not None and p.weights is not None:
        absent = in_all_replicates(p.weights == 0, len(p.samples))
        values = values.masked_fill(absent.unsqueeze(-1) if p.task == "multiclass" else absent, torch.nan)
    return values.transpose(-1, -2) if p.task == "multilabel" else values


def folds_of(p: Predictions, options: FoldOptions) -> tuple[Tensor, int]:
    """Return the fold of each sample, int64 of the shape of `p.target`, and the number of folds.

    Raises:
        ValueError: if all samples of a class are in one fold: the fit to the other folds would lack the class.
    """
    n_folds, seed = options.get("n_folds", 5), options.get("seed", 0)
    groups, folds = options.get("groups"), options.get("folds")
    check_count("n_folds", n_folds, at_least=2)
    check_seed(seed)
    present = torch.ones_like(p.target, dtype=torch.bool)
    if p.weights is not None:
        present = ~in_all_replicates(p.weights == 0, p.target.dim()).expand(p.target.shape)
    target = p.target.masked_fill(~present, 0).long()
    if folds is not None:
        if groups is not None:
            raise ValueError("`groups` must be None if `folds` are given, got both. Pass one of them.")
        labels, at = torch.unique(_per_sample("folds", folds, p), return_inverse=True)
        if len(labels) < 2:
            raise ValueError(f"`folds` must contain at least 2 folds, got {labels.tolist()}.")
        n_folds = len(labels)
    elif groups is not None:
        at = _grouped(target, present, _per_sample("groups", groups, p), p.num_classes, n_folds, seed)
    else:
        at = _stratified(target, present, n_folds, seed)
    _check_every_class(at, target, present, p.num_classes, n_folds, options)
    return at, n_folds


def _per_sample(name: str, numbers: Tensor, p: Predictions) -> Tensor:
    """Check that there is one integer per sample, and expand them to the shape of `p.target`."""
    check_indices(name, numbers)
    labels = p.task == "multilabel"  # the canonical form is (..., L, N)
    shape = p.target.shape[:-2] + p.target.shape[-1:] if labels else p.target.shape
    if numbers.shape not in (shape, shape[-1:]):
        raise ValueError(f"`{name}` must have one number per sample, shape {tuple(shape)}, got {tuple(numbers.shape)}.")
    numbers = numbers.to(p.target.device).long()
    return (numbers.unsqueeze(-2) if labels and numbers.dim() > 1 else numbers).expand(p.target.shape)


def _stratified(target: Tensor, present: Tensor, n_folds: int, seed: int) -> Tensor:
    """Return a random fold per sample: shuffle the samples of each class, and assign the folds in turn."""
    generator = torch.Generator().manual_seed(seed)
    key = torch.rand(target.shape[-1], generator=generator, dtype=torch.float32).to(target.device)
    shuffled = key.argsort()
    by_class = torch.where(present, target, torch.iinfo(torch.int64).max)[..., shuffled]
    order = shuffled[by_class.sort(dim=-1, stable=True).indices]
    turn = torch.arange(target.shape[-1], device=target.device) % n_folds
    return torch.empty_like(target).scatter_(-1, order, turn.expand(target.shape))


def _grouped(target: Tensor, present: Tensor, groups: Tensor, n_classes: int, n_folds: int, seed: int) -> Tensor:
    """Return a fold per sample, equal within a group. Larger groups are assigned first; see `cross_val_calibrate`."""
    rows = [x.reshape(-1, target.shape[-1]).cpu() for x in (target, present, groups)]
    found = []
    for labels, is_present, group in zip(*rows, strict=True):
        names, index = torch.unique(group, return_inverse=True)
        counts = torch.zeros(len(names), n_classes, dtype=torch.float64)
        counts.index_put_((index, labels), is_present.double(), accumulate=True)
        shuffled = torch.randperm(len(names), generator=torch.Generator().manual_seed(seed))
        order = shuffled[counts.sum(-1)[shuffled].sort(stable=True, descending=True).indices]
        total = counts.sum(0).clamp(min=1)
        load, fold_of = torch.zeros(n_folds, n_classes, dtype=torch.float64), torch.zeros(len(names), dtype=torch.int64)
        for g in order.tolist():
            fold = int((load @ (counts[g] / total.square())).argmin())
            fold_of[g] = fold
            load[fold] += counts[g]
        found.append(fold_of[index])
    return torch.stack(found).reshape(target.shape).to(target.device) if found else torch.zeros_like(target)


def _check_every_class(
    at: Tensor, target: Tensor, present: Tensor, n_classes: int, n_folds: int, options: FoldOptions
) -> None:
    cell = at * n_classes + target
    counts = cell.new_zeros((*cell.shape[:-1], n_folds * n_classes)).scatter_add(-1, cell, present.long())
    counts = counts.reshape(*cell.shape[:-1], n_folds, n_classes)
    alone = ((counts == counts.sum(-2, keepdim=True)) & (counts > 0)).flatten(0, -2).any(0)
    if value_if_available(alone.any()):
        label = int(alone.int().argmax())
        for name in ("folds", "groups"):
            if options.get(name) is not None:
                raise ValueError(
                    f"`{name}` must leave samples of every class in every training part, got class {label} in one fold "
                    "only. Spread the class over two folds, or pass train_on_test=True."
                )
        raise ValueError(
            f"`target` must have at least 2 samples of every class for cross-validation, got 1 of class {label}. "
            "Drop the class with ignore_index, give `calibration`, or pass train_on_test=True."
        )
