"""A calibrator fitted to the validation samples of all ranks."""

import io
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed

from torchcalib.calibration.calibrator import Calibrator, Transform
from torchcalib.core.inputs import InputFormat
from torchcalib.metrics.gathering import gathered_bytes, rank_and_size
from torchcalib.reporting.kept import KeptSamples


class SharedSamples:
    """Samples of this rank, in CPU memory, that meet those of the others on the first rank to be fitted to.

    They are kept up to the limits of `KeptSamples`, of which each rank has an equal share.
    """

    def __init__(self, input_format: InputFormat) -> None:
        self._format = input_format
        self._rank, self._n_ranks = rank_and_size()
        self._kept = KeptSamples(input_format, self._n_ranks)

    def add(self, preds: Tensor, target: Tensor, weights: Tensor | None) -> None:
        """Keep a batch that has been checked."""
        self._kept.add(preds.detach().cpu(), target.cpu(), None if weights is None else weights.cpu())

    def fit(self, calibrator: Calibrator[Any]) -> tuple[Transform | None, tuple[str, ...]]:
        """Fit to the samples of all ranks, rank by rank; every rank must call it.

        Returns:
            The transform, the same on every rank, or None where it cannot be fitted; and what there is to say of it.
        """
        kept = self._met()
        result: list[Any] = [None if kept is None else _fitted(calibrator, kept, self._format)]
        if self._n_ranks > 1:
            distributed.broadcast_object_list(result, src=0)
        transform, remarks = result[0]
        if transform is not None:
            transform.class_axis = self._format.class_axis
        return transform, remarks

    def _met(self) -> KeptSamples | None:
        """All samples on the first rank, None on the others."""
        if self._n_ranks == 1:
            return self._kept
        given: tuple[Any, ...] = ()
        if self._kept.has_samples:
            preds, target, options = self._kept.given()
            given = preds, target, options.get("weights")
        content = io.BytesIO()
        torch.save((self._kept.why_not, given), content)
        contents = gathered_bytes(content.getvalue())
        if self._rank != 0:
            return None
        together = KeptSamples(replace(self._format, class_axis=-1))  # classes are last in what is kept
        for why_not, given in (torch.load(io.BytesIO(part), weights_only=True) for part in contents):
            together.why_not = together.why_not or why_not
            if given:
                together.add(*given)
        return together


def _fitted(
    calibrator: Calibrator[Any], kept: KeptSamples, input_format: InputFormat
) -> tuple[Transform | None, tuple[str, ...]]:
    """Fit; a fit that cannot be made is no reason to end a training."""
    why_not = "targets are shares, and no labels" if kept.has_shares else kept.why_not
    if not why_not and not kept.has_samples:
        why_not = "there are no samples"
    if why_not:
        return None, (f"no calibrator is fitted: {why_not}.",)
    try:
        preds, target, options = kept.given()
        p = calibrator.read(preds, target, task=input_format.task, options=options)
        with torch.inference_mode(False):  # whose tensors no gradient could ever pass
            transform = calibrator.fit_to(p)
    except (RuntimeError, ValueError, TypeError) as error:
        return None, (f"no calibrator is fitted: {str(error).splitlines()[0]}",)
    return transform, tuple(f"the calibrator: {remark}" for remark in transform.remarks())
