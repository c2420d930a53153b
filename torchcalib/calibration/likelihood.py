"""Functions that calibrators with maximum likelihood fits share: shapes, checks, remarks and words."""

import math
import weakref
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from torchcalib.calibration.calibrator import sample_weights
from torchcalib.core.predictions import Predictions
from torchcalib.ops.logs import safe_log
from torchcalib.ops.newton import AT_ZERO, CONVERGED, NO_DATA, STOPPED
from torchcalib.ops.newton.fits import AffineFit, fit_temperature

NO_DATA_REMARK = "there are no samples of positive weight: calibrated predictions are NaN."

_COMMON_REMARKS = {
    STOPPED: "the fit stopped before its gradient was small. Check the scale of the predictions.",
    NO_DATA: NO_DATA_REMARK,
}
_SHOWN_CLASSES = 8  # number of classes without samples that a remark lists


class FlatFits(NamedTuple):
    """Scores, labels and weights of S fits to N samples with R replicate weights."""

    scores: Tensor  # scores `(S, N, *)`
    target: Tensor  # labels `(S, N)`
    weights: Tensor  # weights `(R, S, N)`
    batch: torch.Size  # shape of the fits, of R * S elements

    @classmethod
    def from_predictions(cls, p: Predictions, scores: Tensor, weights: Tensor | None) -> "FlatFits":
        """Flatten batch axes of labels `(..., N)` and scores `(..., N, *)` into one axis, and any replicate axes."""
        w = sample_weights(p, weights)
        samples = p.target.shape
        n_fits, n_replicates = samples[:-1].numel(), w.shape[: w.dim() - len(samples)].numel()
        return cls(
            scores.reshape(n_fits, samples[-1], *scores.shape[len(samples) :]),
            p.target.reshape(n_fits, samples[-1]),
            w.reshape(n_replicates, n_fits, samples[-1]),
            w.shape[:-1],
        )

    def parameters(self, **fitted: Tensor) -> dict[str, Tensor]:
        """Return fitted parameters `(R, S, *)` in the batch shape, and `converged` for their `outcome`."""
        found = {name: x.reshape((*self.batch, *x.shape[2:])) for name, x in fitted.items()}
        return {**found, "converged": (found["outcome"] == CONVERGED) | (found["outcome"] == AT_ZERO)}


def temperature_fit(p: Predictions, flat: FlatFits, weights: Tensor | None) -> AffineFit:
    """Fit the temperature of flat predictions, or return the previous fit to the same tensor of replicate weights.

    Several methods start from it. A report fits all of them to the same weights.
    """
    if weights is None or torch.compiler.is_compiling():
        return fit_temperature(flat.scores, flat.target.long(), flat.weights)
    reference, previous = p.computed.get("temperature_fit", (lambda: None, None))
    if reference() is weights:
        fit: AffineFit = previous
        return fit
    fit = fit_temperature(flat.scores, flat.target.long(), flat.weights)
    p.computed["temperature_fit"] = weakref.ref(weights), fit
    return fit


def check_class_count(values: Tensor, n_classes: int) -> None:
    """Raise a ValueError unless predictions `(..., N, C)` have the number of classes of the fit."""
    if values.shape[-1] != n_classes:
        raise ValueError(
            f"`preds` must have {n_classes} classes, as in the fit of the calibrator, got {values.shape[-1]}. "
            "Set class_axis if the classes are on another axis."
        )


def log_scores(values: Tensor, from_logits: bool) -> Tensor:
    """Return log-probabilities up to a constant per row. A log-softmax of logits would round small logits."""
    return values - values.detach().amax(-1, keepdim=True) if from_logits else safe_log(values)


def scaled_and_shifted(scores: Tensor, log_q: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Return scale * scores + bias `(..., N, C)`: -inf where log q is -inf, and log q in rows where all are -inf."""
    excluded = log_q == -torch.inf
    # A factor of 0 for excluded classes would have a gradient of NaN.
    z = (scale * scores.masked_fill(excluded, 0)).masked_fill(excluded, -torch.inf) + bias
    return torch.where((z == -torch.inf).all(-1, keepdim=True), log_q, z)


def remarks_of_fits(outcome: Tensor, words: Mapping[int, str]) -> list[str]:
    """Return a sentence for each outcome with a problem, with the number of fits if there are several.

    `words` contains the sentences of codes whose meaning depends on the method.
    """
    n_fits, words = outcome.numel(), {**words, **_COMMON_REMARKS}
    codes = outcome.flatten().tolist()
    counts = {code: codes.count(code) for code in words}
    return [
        f"{count} of {n_fits} fits: {words[code]}" if n_fits > 1 else words[code]
        for code, count in counts.items()
        if count
    ]


def remarks_of_fits_with_biases(
    outcome: Tensor, words: Mapping[int, str], absent: Tensor, lost: Tensor, consequence: str
) -> list[str]:
    """Return `remarks_of_fits`, and sentences on classes without samples and on labels with probability 0.

    `absent` `(..., C)` is True for classes without samples. Such labels have the total weight `lost` `(...)`.
    """
    found = remarks_of_fits(outcome, words)
    classes = absent.any(tuple(range(absent.dim() - 1))).nonzero().flatten().tolist()
    if classes:
        shown = ", ".join([*map(str, classes[:_SHOWN_CLASSES]), *["..."] * (len(classes) > _SHOWN_CLASSES)])
        found.append(
            f"`target` has no samples of class {shown} with a predicted probability between 0 and 1: it gets the mean "
            "bias of the other classes. Calibrate on samples of every class."
        )
    if bool((lost > 0).any()):
        weight = f"{float(lost.max()):g}"
        found.append(f"`preds` gives probability 0 to the label of samples of total weight {weight}: {consequence}")
    return found


def temperature_in_words(temperature: float) -> str:
    """Return a temperature and its effect as a clause."""
    if math.isnan(temperature):
        return "no temperature"
    if math.isinf(temperature):
        return "infinite temperature (constant probabilities)"
    shown = f"{temperature:.3g}"
    effect = "lowers" if float(shown) > 1 else "raises" if float(shown) < 1 else "keeps"
    return f"temperature {shown} ({effect} confidence)"
