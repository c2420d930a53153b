"""Streaming calibration metrics for `transformers.Trainer`, which does not need to store all logits."""

import weakref
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import torch
from torch import Tensor

from torchcalib.core.arguments import StreamOptions, Task
from torchcalib.core.gathering import rank_and_size
from torchcalib.metrics.base import CalibrationMetric
from torchcalib.metrics.collection import CalibrationCollection
from torchcalib.metrics.errors import ECE
from torchcalib.metrics.scores import ECD, NLL, Accuracy, BrierScore

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
    """Compute calibration metrics in the evaluations of `transformers.Trainer`.

    Pass both hooks of one object to the Trainer::

        calibration = CalibrationMetrics(task="multiclass")
        trainer = Trainer(
            ...,
            compute_metrics=calibration.compute_metrics,
            preprocess_logits_for_metrics=calibration.preprocess_logits_for_metrics,
        )
        trainer.evaluate()  # eval_nll, eval_brier, eval_ecd, eval_ece, eval_accuracy

    By default the Trainer stores the logits of a whole evaluation, from all processes, for `compute_metrics`. With this
    class, each batch updates streaming metrics, and the Trainer stores one number per row. Each process updates its
    metrics with its own rows, and `compute` synchronises them. Accelerate repeats rows to fill the last batch; repeated
    rows are dropped, as in the Trainer. After an interrupted evaluation, the next evaluation resets the metrics.

    - **Sequence classification**: `task="multiclass"`. With several labels per row (`problem_type=
      "multi_label_classification"`): `task="multilabel", num_labels=L`. With a single logit: `task="binary"`.
    - **Token classification**: `task="multiclass"`. The last axis of the logits contains the classes. Tokens with label
      -100 are ignored.
    - **Causal language models**: `task="multiclass", shift=True`, because the logits at a position predict the next
      token.

    The model must return logits, or a tuple that starts with the logits; hidden states and attentions are ignored.
    Without labels, as in `trainer.predict` on unlabelled rows, the Trainer receives the logits unchanged. With labels,
    `trainer.predict` returns the metrics, and process numbers instead of predictions.

    Args:
        metrics: metrics by name, with `from_logits=True, ignore_index=-100`. None creates the negative log-likelihood
            (`nll`), Brier score (`brier`), entropic calibration difference (`ecd`), expected calibration error (`ece`)
            and `accuracy`, with the other options.
        shift: whether the logits at position i predict the label at position i + 1.
        **options: `positive_classes`, `class_axis`, `validate_args` and `nan_policy` of all metrics; see
            `torchcalib.functional.InputOptions`.

    Raises:
        TypeError: if `metrics` is not a `CalibrationCollection`, or if options are passed with `metrics`.
        ValueError: if options exclude each other, or if `shift` is True and the metrics have no common `ignore_index`.

    Example:
        >>> from torchcalib.integrations import CalibrationMetrics
        >>> list(CalibrationMetrics(task="multiclass").metrics)
        ['accuracy', 'brier', 'ecd', 'ece', 'nll']
    """

    def __init__(
        self,
        metrics: CalibrationCollection | None = None,
        *,
        task: Task | None = None,
        shift: bool = False,
        from_logits: bool = True,
        ignore_index: int | None = -100,
        num_classes: int | None = None,
        num_labels: int | None = None,
        **options: Unpack[StreamOptions],
    ) -> None:
        all_options: Any = {**options, "from_logits": from_logits, "ignore_index": ignore_index, "task": task}
        all_options |= {"num_classes": num_classes, "num_labels": num_labels}
        defaults = {"from_logits": True, "ignore_index": -100}
        given = [name for name, x in all_options.items() if name in options or x != defaults.get(name)]
        if metrics is None:
            metrics = CalibrationCollection({name: metric(**all_options) for name, metric in _DEFAULT.items()})
        elif not isinstance(metrics, CalibrationCollection):
            raise TypeError(
                f"`metrics` must be a CalibrationCollection or None, got {type(metrics).__name__}. "
                "Pass CalibrationCollection({'ece': ECE(...)})."
            )
        elif given:
            raise TypeError(
                f"`{given[0]}` must not be given together with `metrics`, got both. Pass it to each metric."
            )
        self.metrics = metrics
        self.shift = shift
        formats = [metric.input_format for metric in self._members()]
        ignored = {how.ignore_index for how in formats}
        self._ignored = next(iter(ignored)) if len(ignored) == 1 else None
        self._binary = all(how.task == "binary" for how in formats)
        if shift and self._ignored is None:
            raise ValueError(
                "`ignore_index` must be the same number in all metrics with shift=True, got "
                f"{sorted(ignored, key=str)}. Pass ignore_index=-100 to each: the last position has no next label."
            )
        self.reset()

    def reset(self) -> None:
        """Reset the metrics and the row counts."""
        self.metrics.reset()
        self._n_rows = self._n_stored = 0
        self._active_loader: tuple[weakref.ref[Any] | None, int] = (None, 0)

    def preprocess_logits_for_metrics(self, logits: Any, labels: Any) -> Any:
        """Update the metrics with a batch.

        Args:
            logits: logits `(B, C)`, `(B, T, C)` or `(B,)`, or a tuple that starts with them.
            labels: labels `(B,)`, `(B, T)` or `(B, C)`, or None.

        Returns:
            The number of this process for each row, int64 `(B,)`. Without labels, the unchanged `logits`.

        Raises:
            TypeError: if logits or labels are not tensors.
        """
        if labels is None:
            return logits
        while isinstance(logits, tuple | list) and logits:
            logits = logits[0]
        advice = {"logits": "Return the logits first in `forward`.", "labels": "Pass one name in label_names."}
        for name, given in (("logits", logits), ("labels", labels)):
            if not isinstance(given, Tensor):
                raise TypeError(f"`{name}` must be a tensor, got {type(given).__name__}. {advice[name]}")
        state = GradientState()
        loader = state.active_dataloader
        times = sum(other is loader for other in state.dataloader_references)
        before, times_before = self._active_loader
        if (before() if before else None) is not loader or times != times_before:
            self.reset()
            self._active_loader = (None if loader is None else weakref.ref(loader), times)
        (rank, _), n_rows = rank_and_size(), len(labels)
        # `Accelerator.gather_for_metrics` concatenates the batches of all processes, and after the last one returns
        # only the first `remainder` rows.
        distinct = n_rows
        if state.end_of_dataloader and state.remainder > 0:
            distinct = min(max(int(state.remainder) - rank * n_rows, 0), n_rows)
        device = logits.device
        if any(metric.device != device for metric in self._members()):
            self.metrics.to(device)
        # Update even if all rows are repeated, because `compute` warns about a metric without an update.
        self.metrics.update(*self._aligned(logits[:distinct], labels[:distinct]))
        self._n_rows += distinct
        return torch.full((n_rows,), rank, dtype=torch.int64, device=device)

    def compute_metrics(self, evaluated: "EvalPrediction", compute_result: bool = True) -> dict[str, float]:
        """Return the metric values over the rows of all processes, and reset the metrics.

        Args:
            evaluated: the results of `preprocess_logits_for_metrics`, which the Trainer has stored.
            compute_result: True for the last call of an evaluation. With `batch_eval_metrics=True`, the Trainer calls
                this hook once per batch.

        Returns:
            Values by metric name, or by `name_0`, `name_1`, ... for a metric with one value per class. Empty before the
            last call.

        Raises:
            ValueError: if rows on CUDA are invalid, because `update` does not check them there.
            RuntimeError: if the Trainer did not store all rows. The cause is a missing hook or a different evaluation
                loop.
        """
        try:
            rank, _ = rank_and_size()
            self._n_stored += _n_rows_of(rank, evaluated.predictions)
            if not compute_result:
                return {}
            if self._n_stored != self._n_rows:
                raise RuntimeError(
                    f"`evaluated` must contain all {self._n_rows} rows of process {rank}, got {self._n_stored}. "
                    "Pass both hooks of one CalibrationMetrics, and use the evaluation loop of the Trainer."
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

    def _aligned(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of the logits, and labels, with the shapes that the metrics require."""
        if logits.dim() == 3 and labels.dim() == 2:
            # Transformers has classes last: (batch, sequence, classes). The shapes do not determine the class axis if
            # the sequence is as long as the number of classes.
            for metric in self._members():
                metric.input_format = metric.input_format.preferring(-1)
        if self._binary and logits.shape == (*labels.shape, 1):
            logits = logits.squeeze(-1)
        if self.shift:
            if labels.dim() != 2:
                raise ValueError(
                    f"`labels` must be (B, T) with shift=True, got shape {tuple(labels.shape)}. Pass shift=False."
                )
            assert self._ignored is not None
            labels = torch.cat((labels[:, 1:], torch.full_like(labels[:, :1], self._ignored)), 1)
        return logits, labels


def _n_rows_of(rank: int, stored: Any) -> int:
    """Return the number of rows of process `rank` in an array of process numbers, or in a list of such arrays."""
    if isinstance(stored, tuple | list):
        return sum(_n_rows_of(rank, part) for part in stored)
    ranks = np.asarray(stored.cpu() if isinstance(stored, Tensor) else stored)
    if ranks.dtype != np.int64 or ranks.ndim > 1:
        raise RuntimeError(
            "`evaluated` must contain results of `preprocess_logits_for_metrics`, got predictions of dtype "
            f"{ranks.dtype} and shape {ranks.shape}. Pass both hooks of one CalibrationMetrics to the Trainer."
        )
    return int((ranks == rank).sum())
