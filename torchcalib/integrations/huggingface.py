"""Calibration metrics for `transformers.Trainer`, updated batch by batch without storing logits."""

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from torchcalib.metrics.base import CalibrationMetric
from torchcalib.metrics.binned import ECE
from torchcalib.metrics.collection import CalibrationCollection
from torchcalib.metrics.gathering import rank_and_size
from torchcalib.metrics.proper_scores import ECD, NLL, Accuracy, BrierScore

try:
    from accelerate.state import GradientState
except ImportError as error:
    raise ImportError(
        "`torchcalib.integrations.huggingface` needs accelerate, which is not installed. "
        "Install it: pip install 'torchcalib[huggingface]'."
    ) from error

if TYPE_CHECKING:
    from transformers import EvalPrediction

_DEFAULT = {"nll": NLL, "brier": BrierScore, "ecd": ECD, "ece": ECE, "accuracy": Accuracy}


class CalibrationMetrics:
    """Calibration metrics in the evaluations of `transformers.Trainer`. Pass both hooks of the same object.

        calibration = CalibrationMetrics(task="multiclass")
        trainer = Trainer(
            ...,
            compute_metrics=calibration.compute_metrics,
            preprocess_logits_for_metrics=calibration.preprocess_logits_for_metrics,
        )
        trainer.evaluate()  # eval_nll, eval_brier, eval_ecd, eval_ece, eval_accuracy

    By default the Trainer stores the logits of a whole evaluation, of all processes, for `compute_metrics`. Here each
    batch updates streaming metrics, and the Trainer stores one number per row. With several processes each updates its
    own metrics with its own rows; `compute` synchronises them. Rows that accelerate repeats to fill the last batch are
    left out, as the Trainer leaves them out. The next evaluation resets the metrics after an interrupted one.

    - **Sequence classification**: `task="multiclass"`. With several labels per row (`problem_type=
      "multi_label_classification"`): `task="multilabel", num_labels=L`. With a single logit: `task="binary"`.
    - **Token classification**: the same; tokens with label -100 are ignored.
    - **Causal language models**: `task="multiclass", shift=True`, because the logits at a token predict the next one.

    The output of the model is its logits, or a tuple whose first element they are; hidden states and attentions after
    it are ignored. Without labels, as in `trainer.predict` on unlabelled rows, the Trainer gets the logits unchanged.
    With labels `trainer.predict` returns the metrics, and process numbers instead of predictions.

    Args:
        metrics: metrics by name, with `from_logits=True, ignore_index=-100`. None: `nll`, `brier`, `ecd`, `ece` and
            `accuracy`, made with `options`.
        shift: whether the logits at position i predict the label at i + 1.
        **options: options of the default metrics: `task`, `num_classes`, `num_labels`, `positive_classes`, ...;
            `from_logits` is True and `ignore_index` -100 by default.

    Raises:
        TypeError: for metrics that are not a `CalibrationCollection`, or options in addition to metrics.
        ValueError: for options that exclude each other; for `shift` without an `ignore_index`.
    """

    def __init__(self, metrics: CalibrationCollection | None = None, *, shift: bool = False, **options: Any) -> None:
        if metrics is None:
            options = {"from_logits": True, "ignore_index": -100, **options}
            metrics = CalibrationCollection({name: metric(**options) for name, metric in _DEFAULT.items()})
        elif not isinstance(metrics, CalibrationCollection):
            raise TypeError(f"`metrics` must be a CalibrationCollection or None, got {type(metrics).__name__}.")
        elif options:
            raise TypeError(
                f"`{next(iter(options))}` must be an option of the metrics, got metrics that already exist. "
                "Pass it to each of them."
            )
        self.metrics = metrics
        self.shift = shift
        formats = [metric.input_format for metric in self._members()]
        ignored = {how.ignore_index for how in formats}
        self._ignored = next(iter(ignored)) if len(ignored) == 1 else None
        self._counts_labels = any(how.hard_targets for how in formats)
        self._binary = all(how.task == "binary" for how in formats)
        if shift and self._ignored is None:
            raise ValueError(
                "`ignore_index` must be one and the same of all metrics with shift=True, got "
                f"{sorted(ignored, key=str)}. The last position of a sequence has no next label."
            )
        self.reset()

    def reset(self) -> None:
        """Reset the metrics and the row counts."""
        self.metrics.reset()
        self._n_rows = self._n_kept = 0
        self._under_way: tuple[weakref.ref[Any] | None, int] = (None, 0)

    def preprocess_logits_for_metrics(self, logits: Any, labels: Any) -> Any:
        """Update the metrics with a batch.

        Args:
            logits: `(B, C)`, `(B, T, C)` or `(B,)`, or a tuple whose first element they are.
            labels: labels of the same rows, or None.

        Returns:
            int64 `(B,)`, the number of this process for each row; without labels the unchanged logits.
        """
        if labels is None:
            return logits
        while isinstance(logits, tuple | list) and logits:
            logits = logits[0]
        for name, given in (("logits", logits), ("labels", labels)):
            if not isinstance(given, Tensor):
                raise TypeError(
                    f"`{name}` must be a tensor, got {type(given).__name__}. Name one label in label_names."
                )
        self._reset_in_a_new_evaluation()
        (rank, _), n_rows = rank_and_size(), len(labels)
        distinct = _n_distinct(n_rows, rank)
        device = logits.device
        if any(metric.device != device for metric in self._members()):
            self.metrics.to(device)
        # An update without rows counts as an update; metrics without any would warn.
        self.metrics.update(*self._aligned(logits[:distinct], labels[:distinct]))
        self._n_rows += distinct
        return torch.full((n_rows,), rank, dtype=torch.int64, device=device)

    def compute_metrics(self, evaluated: "EvalPrediction", compute_result: bool = True) -> dict[str, float]:
        """Return the values over the rows of all processes, and reset the metrics.

        Args:
            evaluated: results of `preprocess_logits_for_metrics` that the Trainer stored.
            compute_result: whether the evaluation ends; False with `batch_eval_metrics=True` before the last batch.

        Returns:
            A float for each metric, or `name_0`, `name_1`, ... for a metric with a value per class. Empty before the
            end of the evaluation.

        Raises:
            ValueError: for invalid rows on CUDA, which `update` does not check there.
            RuntimeError: if the Trainer did not store all rows: the other hook was not passed, or the evaluation loop
                is not the Trainer's.
        """
        try:
            rank, _ = rank_and_size()
            self._n_kept += _n_rows_of(rank, evaluated.predictions)
            if not compute_result:
                return {}
            if self._n_kept != self._n_rows:
                raise RuntimeError(
                    f"the Trainer must keep the {self._n_rows} rows that process {rank} measured, got "
                    f"{self._n_kept} of them. Leave gathering to the Trainer's own evaluation loop."
                )
            values = self.metrics.compute()
        except BaseException:
            self.reset()
            raise
        self.reset()
        return {
            f"{name}_{k}" if value.dim() else name: part
            for name, value in values.items()
            for k, part in enumerate(value.flatten().tolist())
        }

    def _members(self) -> list[CalibrationMetric[Any]]:
        return [metric for metric in self.metrics.values() if isinstance(metric, CalibrationMetric)]

    def _reset_in_a_new_evaluation(self) -> None:
        """Reset after an interrupted evaluation: the Trainer marks the end of an evaluation, but not its start.

        Accelerate lists the data loaders in use. An interrupted one stays in the list while it is referenced, and is
        listed a second time if it is iterated again.
        """
        state = GradientState()
        loader = state.active_dataloader
        times = sum(other is loader for other in state.dataloader_references)
        before, times_before = self._under_way
        if (before() if before else None) is not loader or times != times_before:
            self.reset()
            self._under_way = (None if loader is None else weakref.ref(loader), times)

    def _aligned(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and labels in the shapes and dtypes that the metrics take, without a copy of the logits."""
        if self._binary and logits.shape == (*labels.shape, 1):
            logits = logits.squeeze(-1)
        if self.shift:
            if labels.dim() != 2:
                raise ValueError(f"`labels` must be (B, T) with shift=True, got shape {tuple(labels.shape)}.")
            assert self._ignored is not None  # checked in __init__
            labels = torch.cat((labels[:, 1:], torch.full_like(labels[:, :1], self._ignored)), 1)
        if self._counts_labels and labels.is_floating_point():  # a BCE loss needs float labels
            whole = labels.long()
            labels = whole if bool((whole == labels).all()) else labels
        return logits, labels


def _n_distinct(n_rows: int, rank: int) -> int:
    """Return how many rows of this batch `Accelerator.gather_for_metrics` keeps.

    It concatenates the batches of all processes in order, and keeps the first `remainder` rows of the last batch.
    """
    state = GradientState()
    if not state.end_of_dataloader or state.remainder <= 0:
        return n_rows
    return min(max(int(state.remainder) - rank * n_rows, 0), n_rows)


def _n_rows_of(rank: int, stored: Any) -> int:
    """Return how many rows of one or more stored arrays are from this process."""
    if isinstance(stored, tuple | list):
        return sum(_n_rows_of(rank, part) for part in stored)
    ranks = np.asarray(stored.cpu() if isinstance(stored, Tensor) else stored)
    if ranks.dtype != np.int64 or ranks.ndim > 1:
        raise RuntimeError(
            "`preprocess_logits_for_metrics` must process the logits before `compute_metrics`, got predictions "
            f"{ranks.dtype} {ranks.shape}. Pass both hooks of one CalibrationMetrics to the Trainer."
        )
    return int((ranks == rank).sum())
