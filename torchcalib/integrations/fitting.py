"""Fit a calibrator to the validation samples of all ranks."""

import io
from dataclasses import replace
from typing import Any

import torch
from torch import distributed

from torchcalib.calibration.calibrator import Calibrator, Transform
from torchcalib.core.inputs import InputFormat
from torchcalib.metrics.gathering import gathered_bytes, rank_and_size
from torchcalib.reporting.kept import KeptSamples

Fitted = tuple[Transform | None, tuple[str, ...]]
"""A transform, or None if it cannot be fitted, and remarks on it."""


def fit_on_all_ranks(calibrator: Calibrator[Any], kept: KeptSamples, input_format: InputFormat) -> Fitted:
    """Fit to the samples of all ranks, in the order of ranks. Every rank must call it and gets the same result."""
    rank, n_ranks = rank_and_size()
    if n_ranks > 1:
        kept = _gathered(kept, input_format)
    result: list[Any] = [_fitted(calibrator, kept, input_format) if rank == 0 else None]
    if n_ranks > 1:
        distributed.broadcast_object_list(result, src=0)
    transform, remarks = result[0]
    if transform is not None:
        transform.class_axis = input_format.class_axis
    return transform, remarks


def _gathered(kept: KeptSamples, input_format: InputFormat) -> KeptSamples:
    """Return the samples of all ranks on the first rank, and none on the others."""
    given: tuple[Any, ...] = ()
    if kept.has_samples:
        preds, target, options = kept.given()
        given = preds, target, options.get("weights")
    content = io.BytesIO()
    torch.save((kept.why_not, given), content)
    together = KeptSamples(replace(input_format, class_axis=-1))  # `given` has classes last
    for part in gathered_bytes(content.getvalue()):
        why_not, given = torch.load(io.BytesIO(part), weights_only=True)
        together.why_not = together.why_not or why_not
        if given:
            together.add(*given)
    return together


def _fitted(calibrator: Calibrator[Any], kept: KeptSamples, input_format: InputFormat) -> Fitted:
    """Fit without raising, because a failed fit must not end a training."""
    why_not = "targets are class probabilities, not labels" if kept.has_shares else kept.why_not
    if not why_not and not kept.has_samples:
        why_not = "there are no samples"
    if why_not:
        return None, (f"no calibrator is fitted: {why_not}.",)
    try:
        preds, target, options = kept.given()
        p = calibrator.read(preds, target, task=input_format.task, options=options)
        with torch.inference_mode(False):  # inference tensors could not be used in a backward pass later
            transform = calibrator.fit_to(p)
    except (RuntimeError, ValueError, TypeError) as error:
        return None, (f"no calibrator is fitted: {str(error).splitlines()[0]}",)
    return transform, tuple(f"the calibrator: {remark}" for remark in transform.remarks())
