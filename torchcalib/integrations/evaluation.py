"""Evaluate the calibration of a model on the batches of a data loader."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchcalib.core.arguments import NanPolicy, Task, advising
from torchcalib.core.clusters import identifiers, of_samples
from torchcalib.core.groups import numbered_groups
from torchcalib.core.tasks import per_sample, prepare
from torchcalib.integrations.causal_lm import NextTokens
from torchcalib.integrations.outputs import Found, call_by_name, described, predictions_in, tensor_named
from torchcalib.io.errors import shown
from torchcalib.io.names import TARGETS, WEIGHTS
from torchcalib.reporting.building import ReportBuilder
from torchcalib.results.report import Report

Predict = Callable[[Any, Any], Any]

IGNORED = -100
"""Default label of ignored rows, as in `torch.nn.functional.cross_entropy` and in Hugging Face batches."""


@advising("For a scikit-learn classifier call torchcalib.Report.from_estimator(clf, X, y).")
def evaluate(
    model: Callable[..., Any],
    dataloader: Iterable[Any],
    *,
    task: Task | Literal["causal_lm"] | None = None,
    from_logits: bool | None = None,
    class_names: Sequence[str] | None = None,
    predict: Predict | None = None,
    device: str | torch.device | None = None,
    autocast: bool | torch.dtype = False,
    progress: bool = True,
    n_bins: int = 15,
    right: bool = False,
    safe_threshold: float | None = None,
    with_calibration: bool = True,
    with_intervals: bool = True,
    ignore_index: int | None = IGNORED,
    nan_policy: NanPolicy = "raise",
    positive_classes: Sequence[int] | None = None,
    class_axis: int | None = None,
    cluster_by: str | None = None,
    group_by: Callable[[Any, Tensor], Any] | str | None = None,
) -> Report:
    """Compute the predictions of a model for all batches of a data loader, and return their calibration report.

    The model runs in evaluation mode without gradients; the modes of its modules are restored afterwards. Each batch
    updates a `ReportBuilder`, so memory is bounded. With several processes, each process reports on its own batches;
    use `ReportBuilder.gather` to combine them.

    A batch is `(inputs, target)`, or a mapping that contains the target as `labels`, `target`, `y` or a similar name.
    The model then receives the entries with the names of its arguments, or else the only other tensor. Its output is a
    tensor, or contains predictions as `logits`, `probs`, `preds` or a similar name, as in Hugging Face models. Other
    batches or outputs require `predict`.

    For a causal language model with `task="causal_lm"`, batches are mappings with `input_ids` `(B, T)`, and optionally
    `attention_mask` and `labels`. Labels are shifted: the prediction at a position is that of the next token. Without
    `labels`, all tokens count that follow an unmasked token. The logits of a Hugging Face model with a linear head are
    never written. The report has no class-wise errors, and no gains of calibrators for such a model. The tokens of each
    batch item are a cluster, unless `cluster_by` names other clusters.

    Args:
        model: a module, or any callable.
        dataloader: iterable of batches.
        task: `"binary"`, `"multiclass"`, `"multilabel"` or `"causal_lm"`. None infers it from the shapes of the first
            batch, and sets `task_is_inferred` in the report to True.
        from_logits: whether predictions are logits. None infers it from the name of the predictions, and raises an
            error if they have no name or an ambiguous one.
        predict: function `predict(model, batch)` that returns `(preds, target)` or `(preds, target, weights)`. It
            receives the batch on the device of the model.
        device: device of the model and the batches. A module is moved back afterwards. None selects the device of the
            first parameter.
        autocast: whether to run the model under `torch.autocast`; or the dtype to use there.
        progress: whether to show a progress bar, if stderr is a terminal and the package `rich` is installed.
        cluster_by: clusters of dependent samples; see `torchcalib.Clustered`. `"batch item"` for the samples of each
            item, such as the pixels of an image or the tokens of a document; or the name of an entry of the batch with
            the clusters, such as `"patient"`. None treats samples as independent.
        group_by: groups of samples, for a report that compares them: the name of an entry of the batch with one group
            for each sample, or a function of the batch and the target that returns them; see `groups` in
            `torchcalib.report`. The target of a causal language model is `(B, T - 1)`, shifted, and its groups may also
            be `(B,)`, one for each item.
        class_names: names of the classes or labels in the order of the class axis; the negative class first if binary.
        n_bins: number of equal-width or equal-mass bins.
        right: bins are `(a, b]` instead of `[a, b)`.
        safe_threshold: largest entropic calibration difference (ECD) in nats that is called safe; None does not decide.
        with_calibration: compute the cross-validated gains of calibrators.
        with_intervals: compute 95% intervals, and the p-values and noise floors of rank-based errors.
        ignore_index: rows with this target are ignored.
        nan_policy: `"raise"` an error for rows with NaN, or `"drop"` and count them.
        positive_classes, class_axis: see `torchcalib.functional.InputOptions`.

    Returns:
        The report; see `torchcalib.Report`.

    Raises:
        TypeError: if `model` is not callable or has `predict_proba`, or `predict` does not return two or three values.
        ValueError: if predictions or targets are not found, or values are invalid.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 3)
        >>> loader = [(torch.randn(8, 2), torch.randint(0, 3, (8,))) for _ in range(4)]
        >>> r = evaluate(model, loader, from_logits=True, with_intervals=False)
        >>> r.task, r.n
        ('multiclass', 32.0)
    """
    if hasattr(model, "predict_proba") and not isinstance(model, nn.Module):
        raise TypeError(
            f"`model` must be a module or function, got {type(model).__name__}, a classifier with predict_proba. "
            "Use torchcalib.Report.from_estimator(clf, X, y)."
        )
    if not callable(model):
        raise TypeError(
            f"`model` must be callable, got {type(model).__name__}. "
            "Pass predictions to torchcalib.report(preds, target)."
        )
    if not (cluster_by is None or isinstance(cluster_by, str)):
        raise TypeError(f"`cluster_by` must be {_BATCH_ITEM!r} or the name of an entry, got {shown(cluster_by)}.")
    is_causal = task == "causal_lm"
    if is_causal:
        for name, value in (("predict", predict), ("from_logits", from_logits), ("class_axis", class_axis)):
            if not (value is None or (name == "from_logits" and value is True)):
                raise ValueError(
                    f"`{name}` must be None for task='causal_lm', got {shown(value)}. Pass task='multiclass' instead."
                )
        if ignore_index is None:
            raise ValueError("`ignore_index` must be an int for task='causal_lm', got None. Keep -100.")
        predict, from_logits, cluster_by = NextTokens(ignore_index), True, cluster_by or _BATCH_ITEM
    settings: dict[str, Any] = {
        "n_bins": n_bins,
        "right": right,
        "safe_threshold": safe_threshold,
        "with_calibration": with_calibration,
        "with_intervals": with_intervals,
        "with_classes": not is_causal,
        "nan_policy": nan_policy,
        "positive_classes": positive_classes,
        "class_axis": class_axis,
    }
    known_task: Any = "multiclass" if is_causal else task
    builder: ReportBuilder | None = None
    declared = from_logits
    n_items = 0
    with _evaluation_mode(model, device) as place, torch.no_grad(), _progress_bar(dataloader, progress) as advance:
        for batch in dataloader:
            moved = _to_device(batch, place)
            inputs = moved
            if predict is None and isinstance(moved, Mapping):  # clusters and groups are not inputs of the model
                inputs = {name: value for name, value in moved.items() if name not in (cluster_by, group_by)}
            kind, dtype = (
                "cpu" if place is None else place.type,
                autocast if isinstance(autocast, torch.dtype) else None,
            )
            with nullcontext() if autocast is False else torch.autocast(kind, dtype):
                found, named = _predict_batch(model, inputs, predict, declared)
            p = prepare(
                found.preds,
                found.target,
                known_task,
                class_names=class_names,
                positive_classes=positive_classes,
                from_logits=False,  # names of outputs, or the option, decide for all batches
                ignore_index=ignore_index,
            )
            if builder is None:
                declared = named if declared is None else declared
                if declared is None:
                    raise _undeclared(p.preds)
                is_soft = p.task == "multiclass" and p.target.is_floating_point()
                whole = not is_soft and p.target.dim() < p.preds.dim() + (p.task != "multiclass")
                ignored = ignore_index if whole else None
                builder = ReportBuilder(
                    task=p.task, class_names=p.class_names, from_logits=declared, ignore_index=ignored, **settings
                )
                known_task = p.task
            columns: dict[str, Any] = {
                "weights": None if found.weights is None else per_sample("weights", found.weights, p.preds),
            }
            if cluster_by == _BATCH_ITEM:
                columns["clusters"] = torch.arange(n_items, n_items + len(p.preds), device=p.preds.device)
            elif cluster_by is not None:
                clusters = _entry(moved, "cluster_by", cluster_by, repr(_BATCH_ITEM))
                columns["clusters"] = identifiers(clusters, p.preds.device)
            if group_by is not None:
                groups = (
                    group_by(moved, p.target)
                    if callable(group_by)
                    else _entry(moved, "group_by", group_by, "a function")
                )
                columns["groups"], columns["group_names"] = numbered_groups(
                    groups, None, p.target.device, p.target.shape, keep_partial=True
                )
            n_items += len(p.preds)
            preds, target = p.preds, p.target
            if is_causal:
                counts, kept = target != ignore_index, dict(columns)
                for column in ("weights", "clusters", "groups"):
                    if kept.get(column) is not None:
                        kept[column] = of_samples(kept[column], target.shape)[counts]
                preds, target, columns = preds[counts], target[counts], kept
            builder.update(preds, target, **columns)
            advance()
    if builder is None:
        raise ValueError("`dataloader` must yield at least one batch, got none. Check the data set and its length.")
    return replace(builder.report(), task_is_inferred=task is None)


_BATCH_ITEM = "batch item"


def _entry(batch: Any, option: str, name: Any, other: str) -> Any:
    entries = batch._asdict() if hasattr(batch, "_asdict") else batch
    if not isinstance(entries, Mapping) or name not in entries:
        raise ValueError(
            f"`{option}` must be {other} or the name of an entry of each batch, got {shown(name)} for "
            f"{described(batch)}. Yield batches with this entry."
        )
    return entries[name]


@contextmanager
def _evaluation_mode(model: Any, device: str | torch.device | None) -> Iterator[torch.device | None]:
    """Set a module to evaluation mode on `device`, and restore both afterwards. Yield the device for batches."""
    if not isinstance(model, nn.Module):
        yield None if device is None else torch.device(device)
        return
    tensors = (*model.parameters(), *model.buffers())
    before = tensors[0].device if tensors else None
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        if device is not None:
            model.to(device)
        yield before if device is None else torch.device(device)
    finally:
        for module, training in modes.items():
            module.training = training
        if device is not None and before is not None:
            model.to(before)


@contextmanager
def _progress_bar(dataloader: Iterable[Any], wanted: bool) -> Iterator[Callable[[], None]]:
    """Show a progress bar, if possible. Yield a function to call after each batch."""
    if not (wanted and sys.stderr is not None and sys.stderr.isatty() and find_spec("rich") is not None):
        yield lambda: None
        return
    from torchcalib.reporting.render.terminal import progress

    length: int | None = None
    with suppress(TypeError):  # `len` raises for the loader of an `IterableDataset`
        length = len(dataloader) if isinstance(dataloader, Sized) else None
    with progress(length, "evaluating") as advance:
        yield lambda: advance(1)


def _to_device(x: Any, device: torch.device | None) -> Any:
    if device is None:
        return x
    if isinstance(x, Tensor) or (hasattr(x, "to") and not isinstance(x, nn.Module)):
        return x.to(device)
    if isinstance(x, Mapping):
        return {name: _to_device(value, device) for name, value in x.items()}
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*(_to_device(value, device) for value in x))
    if isinstance(x, list | tuple):
        return type(x)(_to_device(value, device) for value in x)
    return x


def _predict_batch(
    model: Callable[..., Any], batch: Any, predict: Predict | None, from_logits: bool | None
) -> tuple[Found, bool | None]:
    """Return the predictions, target and weights for a batch, and whether their name implies logits (None: unknown)."""
    if predict is not None:
        given = predict(model, batch)
        if not isinstance(given, list | tuple) or len(given) not in (2, 3):
            raise TypeError(
                f"`predict` must return (preds, target) or (preds, target, weights), got {described(given)}."
            )
        return Found(*given), None
    outputs, target, weights = _call_on_batch(model, batch)
    preds, named = predictions_in(outputs, from_logits)
    if preds is None:
        raise ValueError(
            f"`model` must return a tensor, or predictions as 'logits', 'probs' or 'preds', got {described(outputs)}. "
            f"{_EXAMPLE.format(output='model(batch[0])[0]')}"
        )
    return Found(preds, target, weights), named


_EXAMPLE = "Pass predict=lambda model, batch: (preds, target), for example ({output}, batch[1])."


def _call_on_batch(model: Callable[..., Any], batch: Any) -> tuple[Any, Any, Tensor | None]:
    """Return the output of a model for a batch, the target in the batch, and the weights in the batch or None."""
    if isinstance(batch, Mapping) or hasattr(batch, "_fields"):
        entries = dict(batch) if isinstance(batch, Mapping) else batch._asdict()
        target_name = next((name for name in TARGETS if name in entries), None)
        weights_name, weights = tensor_named(entries, WEIGHTS)
        if target_name is None:
            raise ValueError(
                f"`dataloader` must yield targets under a known name ({', '.join(TARGETS[:6])} ...), got "
                f"{described(batch)}. {_EXAMPLE.format(output='model(batch)')}"
            )
        left = {name: value for name, value in entries.items() if name not in (target_name, weights_name)}
        return call_by_name(model, left), entries[target_name], weights
    if isinstance(batch, list | tuple) and len(batch) == 2:
        return model(batch[0]), batch[1], None
    raise ValueError(
        f"`dataloader` must yield (inputs, target) or a mapping, got {described(batch)}. "
        f"{_EXAMPLE.format(output='model(batch[0])')}"
    )


def _undeclared(preds: Tensor) -> ValueError:
    low, high = (float(x) for x in preds.detach().float().aminmax()) if preds.numel() else (0.0, 0.0)
    advice = (
        "Pass from_logits=True if the model ends without softmax or sigmoid, and from_logits=False if it ends with one."
    )
    if low < 0 or high > 1:
        advice = "Probabilities are in [0, 1], so these are logits: pass from_logits=True."
    return ValueError(
        "`from_logits` must be given for predictions without a name, "
        f"got None and values from {low:.4g} to {high:.4g}. {advice}"
    )
