"""Fit a calibrator to the validation samples of all ranks (distributed processes)."""

import io
from typing import Any

import torch
from torch import distributed

from torchcalib.calibration.calibrator import Calibrator
from torchcalib.metrics.gathering import gathered_bytes, rank_and_size, waiting
from torchcalib.reporting.buffer import PredictionBuffer
from torchcalib.reporting.calibration import fitted

_FIT = "fit a calibrator"

Fitted = tuple[Calibrator | None, tuple[str, ...]]
"""Fitted calibrator, or None if the fit is impossible, and texts of warnings."""


def fit_on_all_ranks(calibrator: Calibrator, buffer: PredictionBuffer, class_axis: int = -1) -> Fitted:
    """Fit a calibrator to the samples of all ranks, in rank order. All ranks must call it, and get equal results."""
    rank, n_ranks = rank_and_size()
    if n_ranks > 1:
        buffer = _gathered(buffer)
    result: list[Any] = [_fitted(calibrator, buffer, class_axis) if rank == 0 else None]
    if n_ranks > 1:
        with waiting(_FIT):
            distributed.broadcast_object_list(result, src=0)
    fit: Fitted = result[0]
    return fit


def _gathered(buffer: PredictionBuffer) -> PredictionBuffer:
    """Gather the samples of all ranks. Return all of them on rank 0, and an empty buffer on other ranks."""
    content = io.BytesIO()
    torch.save(buffer.state(), content)
    empty = PredictionBuffer(buffer.input_format)
    parts = (torch.load(io.BytesIO(part), weights_only=True) for part in gathered_bytes(_FIT, content.getvalue()))
    return sum(map(empty.loaded, parts), start=empty)


def _fitted(calibrator: Calibrator, buffer: PredictionBuffer, class_axis: int) -> Fitted:
    """Fit a calibrator. Return it and its warnings; see `Fitted`.

    An error is returned as a warning, with None instead of the calibrator, so that training continues.
    """
    why_not = "targets are class probabilities, not labels" if buffer.has_shares else buffer.why_not
    if not why_not and not buffer.pieces:
        why_not = "there are no samples"
    if why_not:
        return None, (f"no calibrator is fitted: {why_not}.",)
    try:
        fit = fitted(calibrator, buffer.predictions(), class_axis, buffer.input_format.positive_classes)
    except Exception as error:  # other ranks wait for the result
        is_expected = isinstance(error, RuntimeError | ValueError | TypeError) and str(error)
        cause = str(error) if is_expected else f"{type(error).__name__}: {error}"
        return None, (f"no calibrator is fitted: {cause.splitlines()[0]}",)
    return fit, tuple(f"the calibrator: {remark}" for remark in fit.remarks())
