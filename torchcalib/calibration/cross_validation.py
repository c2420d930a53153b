"""Cross-validated calibration, and calibration with a fit to held-out data or to the same data (optimistic)."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Unpack, cast

import torch
from torch import Tensor

from torchcalib.calibration.affine import AffineScaling
from torchcalib.calibration.calibrator import Calibrator, sample_weights
from torchcalib.calibration.folds import FoldOptions, folds_of
from torchcalib.core.arguments import InputOptions, Task, check_flag, with_resolved_task
from torchcalib.core.arrays import as_tensor
from torchcalib.core.inputs import flattened, input_format_of
from torchcalib.core.predictions import Predictions, by_replicates, in_all_replicates
from torchcalib.core.tasks import as_tensors, infers_task
from torchcalib.io.errors import shown
from torchcalib.ops.host_values import value_if_available
from torchcalib.ops.logs import wide_dtype

DEFAULT = AffineScaling()


class CalibrationOptions(FoldOptions, InputOptions, total=False):
    """Options of cross-validated calibration, of its folds and of its input; see `cross_val_calibrate`."""

    train_on_test: bool
    calibration: Sequence[Tensor] | None


_OWN_OPTIONS = {*FoldOptions.__annotations__, "train_on_test", "calibration"}
"""Names of the options that are not input options."""


@infers_task
def cross_val_calibrate(
    preds: Tensor,
    target: Tensor,
    task: Task | None = None,
    *,
    calibrator: Calibrator = DEFAULT,
    **options: Unpack[CalibrationOptions],
) -> Tensor:
    """Calibrate predictions by cross-validation: each sample is calibrated with a fit to the other folds.

    Args:
        preds: Probabilities or logits: binary `(...)`, otherwise with a class axis.
        target: Labels; see `torchcalib.functional.nll`.
        task: `"binary"`, `"multiclass"` or `"multilabel"`. `num_classes` or `num_labels` implies it.
        calibrator: Calibration method; see `torchcalib.calibration`.
        n_folds: Number of folds, 5 by default.
        n_repeats: Number of random splits over which scores are averaged. None: one split for at least 1,000 samples,
            otherwise 1,000 / N splits, at most 5. Stratified and given folds have one split, as has this function.
        seed: Seed of the random splits, which are the same on every device; 0 by default.
        groups: Group numbers, integers `(N,)` or `(..., N)`. All samples of a group, such as a patient or a video, are
            in the same fold. Random folds have similar numbers of samples. Stratified folds also have similar class
            frequencies: larger groups are assigned first, to the fold with the fewest samples of their classes.
        folds: `"random"` (also None), `"stratified"`, or fold numbers `(N,)` or `(..., N)`, integers. Random folds
            do not depend on the labels, except that every class with two or more samples (groups) is kept in every
            training part. Stratified folds have equal class frequencies, as in [EPSR]. A fit then knows the class
            frequencies of the fold on which it is tested, so gains of calibrators with biases are too large. A fit to
            a training part without samples of a class gives this class the mean bias of the others, and a fit to a
            single class changes no predictions.
        train_on_test: Fit and evaluate on the same data. This is optimistic: it overestimates the gain in NLL by about
            the number of parameters divided by N.
        calibration: Held-out data for the fit, `(preds, target)` or `(preds, target, weights)`, with the same input
            options. Its leading axes are those of `preds`, or none.
        **options: Options of the input; see `torchcalib.functional.InputOptions`.

    Returns:
        Calibrated probabilities (or logits) of the shape of `preds`, in its dtype (at least float32). With
        `positive_classes`, the probability (or log-odds) of the set, without the class axis. Rows with an ignored
        target or weight 0 are undefined. Dropped rows are NaN.

    Raises:
        TypeError, ValueError: for invalid input.

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
    task, options = with_resolved_task(task, options)
    if options.get("n_repeats") not in (None, 1):
        raise ValueError(
            f"`n_repeats` must be 1 here, got {shown(options['n_repeats'])}: "
            "each sample has one calibrated prediction. "
            "Call the function with several values of `seed`."
        )
    has_folds = not options.get("train_on_test") and options.get("calibration") is None
    options["n_repeats"] = 1 if has_folds else None
    preds, target, _ = as_tensors(preds, target)
    original, how = preds, input_format_of(task, input_options(options))
    axis = how.resolved(preds, target, how.batch_dims).axis
    preds, target, task, options = flat_input(preds, target, task, options)
    fitting = fitted(preds, target, task, calibrator, options)
    (calibrated,) = fitting.calibrate(fitting.p)
    values = as_given(fitting.p, calibrated, options)
    if task == "binary":
        return values.reshape(original.shape)
    samples = original.movedim(axis, -1).shape[:-1]
    return values.reshape(samples) if fitting.p.task != task else values.reshape(*samples, -1).movedim(-1, axis)


class Fitting(NamedTuple):
    """Checked predictions and the function that calibrates them."""

    p: Predictions
    calibrate: Callable[[Predictions], list[Tensor]]  # maps `p`, or a copy with other weights, to values for each split
    n_fits: int  # number of fits for each replicate
    is_cross_validated: bool = False

    def by_replicates(self, value: Callable[[Predictions, Tensor], Tensor]) -> Tensor:
        """Return the mean over splits of `value(predictions, calibrated values)`, a few replicates at a time."""

        def mean(p: Predictions) -> Tensor:
            found = torch.stack([value(p, values) for values in self.calibrate(p)])
            return found.to(wide_dtype(found.device)).mean(0).to(found.dtype)

        return by_replicates(mean, self.p, self.p.input_preds.numel() * (self.n_fits + 1))


def fitted(preds: Tensor, target: Tensor, task: Task, calibrator: Calibrator, options: CalibrationOptions) -> Fitting:
    """Check the input, and return a `Fitting` to other folds, to held-out data, or to the same data."""
    if not isinstance(calibrator, Calibrator):
        raise TypeError(f"`calibrator` must be a calibrator such as AffineScaling(), got {shown(calibrator)}.")
    p = _checked(preds, target, task, calibrator, input_options(options))
    on_test, held_out = options.get("train_on_test", False), options.get("calibration")
    check_flag("train_on_test", on_test)
    if on_test and held_out is not None:
        raise ValueError("`calibration` must be None with train_on_test=True, got both. Choose one to fit to.")
    if on_test or held_out is not None:
        for name in FoldOptions.__annotations__:
            if options.get(name) is not None:
                other = "train_on_test=True" if on_test else "a `calibration` set"
                raise ValueError(f"`{name}` must be left out with {other}, got {shown(options.get(name))}.")
    if held_out is not None:
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
                "`calibration` must have one weight per sample, got replicate axes "
                f"{tuple(held.replicates)}. It is fitted once for all replicates: remove these axes."
            )
        if value_if_available((sample_weights(held).sum(-1) > 0).all()) is False:
            raise ValueError("`calibration` must have samples of positive weight to fit to, got none.")
        fit = calibrator.fit_to(held)
        with_warning(fit, p)
        return Fitting(p, lambda p: [fit.calibrated(p.values, p.from_logits)], 1)
    if on_test:
        return Fitting(p, lambda p: [with_warning(calibrator.fit_to(p), p).calibrated(p.values, p.from_logits)], 1)
    splits, n_folds = folds_of(p, cast("FoldOptions", options))

    def cross_validated(p: Predictions) -> list[Tensor]:
        fits = with_warning(calibrator.fit_to(p, weights_of_training_parts(p, splits, n_folds)), p)
        return [calibrated_by_fold(p, fits, folds, n_folds, k * n_folds) for k, folds in enumerate(splits)]

    return Fitting(p, cross_validated, len(splits) * n_folds, is_cross_validated=True)


def weights_of_training_parts(p: Predictions, splits: Tensor, n_folds: int) -> Tensor:
    """Return the weights of samples `(S * F, ..., N)`, which are 0 in one of F folds, for `splits` `(S, ..., N)`.

    With R replicates they are `(S * F, R, ..., N)`.
    """
    w = sample_weights(p)
    return torch.stack([w.masked_fill(folds == f, 0) for folds in splits for f in range(n_folds)])


def calibrated_by_fold(p: Predictions, fits: Calibrator, folds: Tensor, n_folds: int, first: int = 0) -> Tensor:
    """Calibrate each sample with the fit to the other folds; `first` is the index of the fit for fold 0."""
    values = p.values
    for f in range(n_folds):
        fit = fits.part(first + f)
        inside = (folds == f).unsqueeze(-1) if p.task == "multiclass" else folds == f
        values = torch.where(inside, fit.calibrated(p.values, p.from_logits), values)
    return values


def _checked(preds: Tensor, target: Tensor, task: Task, calibrator: Calibrator, options: InputOptions) -> Predictions:
    """Check the input. For `positive_classes`, prefer log-odds, because the probability of the set may round to 1."""
    p = calibrator.read(preds, target, task=task, options=options)
    return p.set_in_log_odds() if calibrator.in_log_odds else p


def with_warning(fit: Calibrator, p: Predictions) -> Calibrator:
    """Return the fit, and warn if it did not converge, because the true gain of calibration may be larger.

    Fits without data do not warn: their predictions are NaN. Fits to replicates do not warn, because small replicates
    often have no optimum.
    """
    no_data = ~(sample_weights(p).sum(-1) > 0)
    if not p.replicates and value_if_available((fit.converged | no_data).all()) is False:
        fit.warn()
    return fit


def input_options(options: CalibrationOptions) -> InputOptions:
    """Return the options of `InputOptions`, without the options of calibration."""
    return cast("InputOptions", {name: value for name, value in options.items() if name not in _OWN_OPTIONS})


def flat_input(
    preds: Tensor, target: Tensor, task: Task | None, options: CalibrationOptions
) -> tuple[Tensor, Tensor, Task, CalibrationOptions]:
    """Resolve the task, flatten sample axes into one, and move classes last; see `flattened`."""
    task, options = with_resolved_task(task, options)
    preds, target, given = flattened(task, preds, target, input_options(options))
    kept: dict[str, Any] = {name: value for name, value in options.items() if name in _OWN_OPTIONS}
    lead = preds.shape[: given.get("batch_dims", 0)]
    for name in ("folds", "groups"):
        if kept.get(name) is not None and not isinstance(kept[name], str):
            numbers = as_tensor(name, kept[name], preds.device)
            of_each = numbers.numel() == lead.numel() * preds.shape[len(lead)]
            kept[name] = numbers.reshape(*lead, -1) if of_each else numbers.reshape(-1)
    return preds, target, task, cast("CalibrationOptions", {**kept, **given})


def as_given(p: Predictions, values: Tensor, options: CalibrationOptions) -> Tensor:
    """Convert calibrated values `(..., N[, C])` to the layout of the flat predictions. Dropped rows become NaN."""
    as_log_odds = p.task == "binary" and p.from_logits and not options.get("from_logits")
    values = (values.sigmoid() if as_log_odds else values).to(p.dtype)
    if p.n_dropped is not None and p.weights is not None:
        absent = in_all_replicates(p.weights == 0, len(p.samples))
        values = values.masked_fill(absent.unsqueeze(-1) if p.task == "multiclass" else absent, torch.nan)
    return values.transpose(-1, -2) if p.task == "multilabel" else values
