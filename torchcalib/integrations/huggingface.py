"""Calibration in the evaluations of `transformers.Trainer`, measured batch by batch: its logits never pile up."""

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from torchcalib.metrics.base import StreamingMetric
from torchcalib.metrics.binned import ECE
from torchcalib.metrics.collection import CalibrationCollection
from torchcalib.metrics.gathering import rank_and_size
from torchcalib.metrics.proper_scores import ECD, NLL, Accuracy, Brier

try:
    from accelerate.state import GradientState
except ImportError as error:
    raise ImportError(
        "`torchcalib.integrations.huggingface` must have accelerate, which transformers.Trainer runs on, got none. "
        "Install it: pip install 'torchcalib[huggingface]'."
    ) from error

if TYPE_CHECKING:
    from transformers import EvalPrediction

_USUAL: dict[str, Callable[..., StreamingMetric[Any]]] = {
    "nll": NLL,
    "brier": Brier,
    "ecd": ECD,
    "ece": ECE,
    "accuracy": Accuracy,
}


class CalibrationMetrics:
    """Both hooks that `transformers.Trainer` needs for calibration: pass both, of the same object.

        calibration = CalibrationMetrics(task="multiclass")
        trainer = Trainer(
            ...,
            compute_metrics=calibration.compute_metrics,
            preprocess_logits_for_metrics=calibration.preprocess_logits_for_metrics,
        )
        trainer.evaluate()  # eval_nll, eval_brier, eval_ecd, eval_ece, eval_accuracy

    The Trainer keeps the logits of all of an evaluation, of all processes, for `compute_metrics`. Here each batch goes
    into streaming metrics instead, and the Trainer keeps one number for each of its rows. With several processes every
    process measures its own rows, the sums meet at the end, and rows that accelerate repeats to fill up the last batch
    are left out, as the Trainer leaves them out. An evaluation that was broken off leaves nothing to the next.

    - **Sequence classification**: `task="multiclass"`. A head for several labels (`problem_type=
      "multi_label_classification"`): `task="multilabel", num_labels=L`. One logit for yes or no: `task="binary"`.
    - **Token classification**: the same; tokens whose label is -100 do not count.
    - **Causal language models**: `task="multiclass", shift=True`, for there the logits of a token are of the next one.

    The model's output is its logits, or a tuple that begins with them (hidden states and attentions behind them are
    not looked at). Without labels, as in `trainer.predict` on unlabelled rows, logits go on to the Trainer untouched;
    with labels `trainer.predict` has the metrics, and numbers of processes for predictions.

    Args:
        metrics: what to measure, under its own names; reads logits, and with `ignore_index=-100`. None: `nll`, `brier`,
            `ecd`, `ece` and `accuracy`, made with `options`.
        shift: whether the logits at position i are of the label at i + 1.
        **options: of the usual metrics: `task`, `num_classes`, `num_labels`, `positive_classes`, ...; `from_logits` is
            True and `ignore_index` -100 unless given.

    Raises:
        TypeError: for metrics that are no `CalibrationCollection`, or options beside metrics that have theirs.
        ValueError: for options that do not fit together; for `shift` without an `ignore_index`.
    """

    def __init__(self, metrics: CalibrationCollection | None = None, *, shift: bool = False, **options: Any) -> None:
        if metrics is None:
            options = {"from_logits": True, "ignore_index": -100, **options}
            metrics = CalibrationCollection({name: metric(**options) for name, metric in _USUAL.items()})
        elif not isinstance(metrics, CalibrationCollection):
            raise TypeError(f"`metrics` must be a CalibrationCollection or None, got {type(metrics).__name__}.")
        elif options:
            raise TypeError(
                f"`{next(iter(options))}` must be an option of the metrics, got metrics that are made. "
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
        """Forget the rows of the evaluation under way."""
        self.metrics.reset()
        self._n_rows = self._n_kept = 0
        self._under_way: tuple[weakref.ref[Any] | None, int] = (None, 0)

    def preprocess_logits_for_metrics(self, logits: Any, labels: Any) -> Any:
        """Measure a batch.

        Args:
            logits: `(B, C)`, `(B, T, C)` or `(B,)`, or a tuple that begins with them.
            labels: of the same rows; None where there are none.

        Returns:
            int64 `(B,)`, the number of this process for each row; of unlabelled rows the logits as they came.
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
        self._begin_anew_with_another_evaluation()
        (rank, _), n_rows = rank_and_size(), len(labels)
        distinct = _n_distinct(n_rows, rank)
        device = logits.device
        if any(metric.device != device for metric in self._members()):
            self.metrics.to(device)
        # Where all rows are repeated, none are added: a metric without any update warns.
        self.metrics.update(*self._as_read(logits[:distinct], labels[:distinct]))
        self._n_rows += distinct
        return torch.full((n_rows,), rank, dtype=torch.int64, device=device)

    def compute_metrics(self, evaluated: "EvalPrediction", compute_result: bool = True) -> dict[str, float]:
        """Return the values over the rows of the evaluation, of all processes, and begin anew.

        Args:
            evaluated: what the Trainer kept of what `preprocess_logits_for_metrics` returned.
            compute_result: whether the evaluation is at its end; False with `batch_eval_metrics=True` before that.

        Returns:
            A float for each metric, and of one that has a value for each class `name_0`, `name_1`, ...; nothing before
            the end.

        Raises:
            ValueError: if rows were bad (on CUDA, where `update` does not look).
            RuntimeError: if the Trainer has not kept the rows that were measured: the other hook was not passed, or
                the loop is not the Trainer's own.
        """
        try:
            rank, _ = rank_and_size()
            self._n_kept += sum(_n_rows_of(rank, kept) for kept in _arrays(evaluated.predictions))
            if not compute_result:
                return {}
            if self._n_kept != self._n_rows:
                raise RuntimeError(
                    f"the Trainer must keep the rows that were measured, {self._n_rows} of process {rank}, got "
                    f"{self._n_kept} of them. Leave gathering to the Trainer's own evaluation loop."
                )
            values = self.metrics.compute()
        except BaseException:
            self.reset()
            raise
        self.reset()
        return dict(_named_floats(values))

    def _members(self) -> list[StreamingMetric[Any]]:
        return [metric for metric in self.metrics.values() if isinstance(metric, StreamingMetric)]

    def _begin_anew_with_another_evaluation(self) -> None:
        """Forget rows of an evaluation that was broken off: the Trainer says where one ends, and not where one begins.

        Accelerate knows which data are read. One that was broken off stands there as long as it is held, and once more
        if it is read again.
        """
        state = GradientState()
        loader = state.active_dataloader
        times = sum(other is loader for other in state.dataloader_references)
        before, times_before = self._under_way
        if (before() if before else None) is not loader or times != times_before:
            self.reset()
            self._under_way = (None if loader is None else weakref.ref(loader), times)

    def _as_read(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and labels as the metrics read them; logits are not copied."""
        if self._binary and logits.shape == (*labels.shape, 1):
            logits = logits.squeeze(-1)
        if self.shift:
            if labels.dim() != 2:
                raise ValueError(f"`labels` must be (B, T) with shift=True, got shape {tuple(labels.shape)}.")
            assert self._ignored is not None  # for `shift` was let through
            labels = torch.cat((labels[:, 1:], torch.full_like(labels[:, :1], self._ignored)), 1)
        if self._counts_labels and labels.is_floating_point():  # a BCE loss wants labels as floats
            whole = labels.long()
            labels = whole if bool((whole == labels).all()) else labels
        return logits, labels


def _n_distinct(n_rows: int, rank: int) -> int:
    """How many rows of this process's batch count: those that `Accelerator.gather_for_metrics` keeps.

    It puts the batches of all processes behind each other, in their order, and of the last keeps the first `remainder`.
    """
    state = GradientState()
    if not state.end_of_dataloader or state.remainder <= 0:
        return n_rows
    return min(max(int(state.remainder) - rank * n_rows, 0), n_rows)


def _n_rows_of(rank: int, kept: np.ndarray[Any, Any]) -> int:
    """How many of the rows that the Trainer kept are this process's."""
    if kept.dtype != np.int64 or kept.ndim > 1:
        raise RuntimeError(
            "`preprocess_logits_for_metrics` must see the logits before `compute_metrics` does, got predictions "
            f"{kept.dtype} {kept.shape}. Pass both hooks of one CalibrationMetrics to the Trainer."
        )
    return int((kept == rank).sum())


def _arrays(kept: Any) -> Iterator[np.ndarray[Any, Any]]:
    """Every array of what the Trainer kept: one, or one for each batch."""
    if isinstance(kept, tuple | list):
        for part in kept:
            yield from _arrays(part)
    else:
        yield np.asarray(kept.cpu() if isinstance(kept, Tensor) else kept)


def _named_floats(values: dict[str, Tensor]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if not value.dim():
            yield name, value.item()
        else:
            yield from ((f"{name}_{k}", part) for k, part in enumerate(value.flatten().tolist()))
