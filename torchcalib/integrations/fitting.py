"""A calibrator fitted to the validation samples of all ranks."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed

from torchcalib.calibrators import Calibrator, Transform
from torchcalib.predictions import InputFormat
from torchcalib.report.kept import KeptSamples


class SharedSamples:
    """Samples of this rank, in CPU memory, that meet those of the others on the first rank to be fitted to.

    They are kept up to the limits of `KeptSamples`, of which each rank has an equal share.
    """

    def __init__(self, input_format: InputFormat) -> None:
        self._format = input_format
        self._n_ranks = distributed.get_world_size() if _are_many() else 1
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
        mine = (self._kept.why_not, self._kept.given() if self._kept.has_samples else None)
        is_first = distributed.get_rank() == 0
        everyone: list[Any] | None = [None] * self._n_ranks if is_first else None
        distributed.gather_object(mine, everyone, dst=0)
        if everyone is None:
            return None
        together = KeptSamples(replace(self._format, class_axis=-1))  # classes are last in what is kept
        together.why_not = next((why for why, _ in everyone if why), "")
        for _, given in everyone:
            if given is not None:
                preds, target, options = given
                together.add(preds, target, options.get("weights"))
        return together


def _are_many() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


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
