"""Calibrated predictions: by cross-validation, by a fit to the test set itself, or to a held-out set."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Unpack, cast

import torch
from torch import Tensor

from torchcalib.calibration.affine import DPCalibration
from torchcalib.calibration.calibrator import Calibrator, Transform, series_weights
from torchcalib.calibration.folds import FoldOptions, folds_of
from torchcalib.core.arguments import InputOptions, Task, check_flag
from torchcalib.core.predictions import Predictions, in_all_replicates
from torchcalib.ops.host_values import look

DEFAULT = DPCalibration()
_FOLD_OPTIONS = frozenset(FoldOptions.__annotations__)


class CalibrationOptions(FoldOptions, InputOptions, total=False):
    """How a calibrator is trained, beside the options of folds and of input.

    - `train_on_test` (default False): one fit to all samples, which are then its test as well. Optimistic, by about the
      number of parameters over N in NLL; it is what a bound of the gain is.
    - `calibration` (default None): `(preds, target)` or `(preds, target, weights)` of a held-out set, read with the
      same options; one fit to it. Leading axes are those of the test set, or none.

    Without these two, the calibrator is cross-validated: every sample is calibrated by a fit to the other folds.
    """

    train_on_test: bool
    calibration: Sequence[Tensor] | None


def calibrated(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    calibrator: Calibrator[Any] = DEFAULT,
    **options: Unpack[CalibrationOptions],
) -> Tensor:
    """Calibrate predictions without letting a sample see its own label: by cross-validation, unless said otherwise.

    Args:
        preds: probabilities (or logits): binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`.
        target: integer labels; see `torchcalib.nll`.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        calibrator: what to fit; see `torchcalib.calibration`.
        **options: see `torchcalib.InputOptions`, and `CalibrationOptions` for folds and for other ways of training.

    Returns:
        Predictions of the kind and shape of `preds` (with `positive_classes`: of the set, `(..., N)`), in its dtype (at
        least float32). What `ignore_index` or weight 0 leave out means nothing, and what is dropped is NaN.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Warns:
        UserWarning: see `calibration_loss`.

    Gradient:
        In `preds`, the fitted transforms being constants.

    Source:
        [EPSR] Ferrer, Ramos: Evaluating Posterior Probabilities (TMLR), sec. 2.5.3.

    Example:
        >>> from torchcalib import Temperature
        >>> preds, target = torch.tensor([0.9, 0.8, 0.9, 0.7, 0.6, 0.8]), torch.tensor([1, 0, 1, 0, 0, 1])
        >>> calibrated(preds, target, task="binary", n_folds=3, calibrator=Temperature()).shape
        torch.Size([6])
    """
    p, calibrate, _ = training(preds, target, task, calibrator, options)
    return as_given(p, calibrate(p), options)


class Training(NamedTuple):
    """Input that has been read, and how to calibrate it.

    Attributes:
        p: predictions.
        calibrate: `p`, or the same rows under other weights, to calibrated values in canonical form.
        n_fits: how many transforms are fitted for each way of weighing.
    """

    p: Predictions
    calibrate: Callable[[Predictions], Tensor]
    n_fits: int


def training(
    preds: Tensor, target: Tensor, task: Task, calibrator: Calibrator[Any], options: CalibrationOptions
) -> Training:
    """Read the input, and how to train."""
    if not isinstance(calibrator, Calibrator):
        raise TypeError(f"`calibrator` must be a calibrator such as DPCalibration(), got {calibrator!r}.")
    p = _read(preds, target, task, calibrator, input_options(options))
    on_test, held_out = options.get("train_on_test", False), options.get("calibration")
    check_flag("train_on_test", on_test)
    dealt = [name for name in _FOLD_OPTIONS if options.get(name) is not None]
    if on_test and held_out is not None:
        raise ValueError("`calibration` must be None with train_on_test=True, got both. One of them is fitted to.")
    if dealt and (on_test or held_out is not None):
        other = "train_on_test=True" if on_test else "a `calibration` set"
        raise ValueError(f"`{dealt[0]}` must be left out with {other}, got {options.get(dealt[0])!r}.")
    if held_out is not None:
        transform = _warned_of(calibrator.fit_to(_read_held_out(held_out, p, calibrator, task, options)), p)
        return Training(p, lambda p: transform.calibrated(p.values), 1)
    if on_test:
        return Training(p, lambda p: _warned_of(calibrator.fit_to(p), p).calibrated(p.values), 1)
    folds, n_folds = folds_of(p, cast("FoldOptions", options))

    def cross_validated(p: Predictions) -> Tensor:
        return out_of_fold(p, _warned_of(fit_to_other_folds(p, calibrator, folds, n_folds), p), folds)

    return Training(p, cross_validated, n_folds)


def _read(preds: Tensor, target: Tensor, task: Task, calibrator: Calibrator[Any], options: InputOptions) -> Predictions:
    """Read the input. A set of classes becomes log-odds if the calibrator allows it, because P(set) may round to 1."""
    p = calibrator.read(preds, target, task=task, options=options)
    return p.set_in_log_odds() if calibrator.in_log_odds else p


def fit_to_other_folds(p: Predictions, calibrator: Calibrator[Any], folds: Tensor, n_folds: int) -> Transform:
    """Fit to all folds but one, for each; all fits are one solve.

    Args:
        p: predictions, weighed in R ways or in one.
        calibrator: what to fit.
        folds: of every sample, in [0, n_folds), of the shape of `p.target`.
        n_folds: F.

    Returns:
        A transform of the batch `(F, ...)`, with R after F if there are R ways.
    """
    w = series_weights(p, None)
    fit: Transform = calibrator.fit_to(p, torch.stack([w.masked_fill(folds == f, 0) for f in range(n_folds)]))
    return fit


def out_of_fold(p: Predictions, fit: Transform, folds: Tensor) -> Tensor:
    """Calibrate every sample by the fit to the other folds.

    Args:
        p: predictions.
        fit: what `fit_to_other_folds` returned for them.
        folds: as there.

    Returns:
        Canonical values `(..., N)` or `(..., N, C)`, with R in front if there are R ways.
    """
    result = fit.part(0).calibrated(p.values)
    for f in range(1, len(fit.converged)):
        inside = (folds == f).unsqueeze(-1) if p.task == "multiclass" else folds == f
        result = torch.where(inside, fit.part(f).calibrated(p.values), result)
    return result


def _warned_of(fit: Transform, p: Predictions) -> Transform:
    """Return a fit, and warn if it has no optimum or did not reach it: there may be more to gain than the loss says.

    No data give NaN, which is said without a warning; and of small data sets some replicates have no optimum.
    """
    no_data = ~(series_weights(p, None).sum(-1) > 0)
    if not p.replicates and look((fit.converged | no_data).all()) is False:
        fit.warn()
    return fit


def _read_held_out(
    held_out: Sequence[Tensor], p: Predictions, calibrator: Calibrator[Any], task: Task, options: CalibrationOptions
) -> Predictions:
    """Read the calibration set and check that it fits the test set."""
    if not isinstance(held_out, tuple | list) or len(held_out) not in (2, 3):
        raise TypeError(
            "`calibration` must be (preds, target) or (preds, target, weights), got "
            f"{type(held_out).__name__}. Put the tensors into a tuple."
        )
    weights = held_out[2] if len(held_out) == 3 else None
    held = _read(held_out[0], held_out[1], task, calibrator, {**input_options(options), "weights": weights})
    batch, own = p.target.shape[:-1], held.target.shape[:-1]
    labels = p.task == "multilabel"
    if held.num_classes != p.num_classes or own not in (batch, batch[-1:] if labels else batch[:0]):
        raise ValueError(
            f"`calibration` must have the classes, and the leading axes, of `preds` {tuple(p.values.shape)}, got "
            f"{tuple(held.values.shape)} (samples last, or before the classes)."
        )
    if held.replicates:
        raise ValueError(
            f"`calibration` must have one weight per sample, got {tuple(held.replicates)} of them. Its transform is "
            "the same in every replicate."
        )
    if look((series_weights(held, None).sum(-1) > 0).all()) is False:
        raise ValueError("`calibration` must have samples of positive weight to fit to, got none.")
    return held


def input_options(options: CalibrationOptions) -> InputOptions:
    """Return the options of input among those given."""
    own = _FOLD_OPTIONS | {"train_on_test", "calibration"}
    return cast("InputOptions", {name: value for name, value in options.items() if name not in own})


def as_given(p: Predictions, values: Tensor, options: CalibrationOptions) -> Tensor:
    """Return canonical values in the form of `preds`; what was missing there is NaN again."""
    as_log_odds = p.task == "binary" and p.from_logits and not options.get("from_logits")
    values = (values.sigmoid() if as_log_odds else values).to(p.dtype)
    if p.n_dropped is not None and p.weights is not None:
        absent = in_all_replicates(p.weights == 0, len(p.samples))
        values = values.masked_fill(absent.unsqueeze(-1) if p.task == "multiclass" else absent, torch.nan)
    if p.task == "binary":
        return values
    values = values.transpose(-1, -2) if p.task == "multilabel" else values
    return values.movedim(-1, class_axis_from_the_end(p, options))


def class_axis_from_the_end(p: Predictions, options: CalibrationOptions) -> int:
    """Return the class axis of the input, counted so that axes in front of it do not move it."""
    axis = options.get("class_axis", -1)
    return axis if axis < 0 else axis - p.given.dim()
