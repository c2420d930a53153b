"""Where predictions and targets are in what a validation step returns, and in its batch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

LOGITS = ("logits", "logit", "log_probs")
PROBS = ("probs", "prob", "probabilities")
NEUTRAL = ("preds", "pred", "predictions", "outputs", "output", "y_hat", "y_pred")
TARGETS = ("targets", "target", "labels", "label", "y", "y_true")
WEIGHTS = ("weights", "weight", "sample_weight")

Get = Callable[[Any, Any], Sequence[Tensor | None]]


class Found(NamedTuple):
    """What a batch is measured by: predictions, targets, and weights if there are any."""

    preds: Tensor
    target: Tensor
    weights: Tensor | None = None


def found_by(get: Get | None, outputs: Any, batch: Any, from_logits: bool) -> Found:
    """Return predictions and targets, as `get(outputs, batch)` gives them or, without it, where people put them.

    - Predictions: `outputs` under one of the names `logits`, `probs`, `preds` and the like; the first of a tuple (a
      loss in front is passed over); or `outputs` itself.
    - Targets: `outputs` under `targets`, `labels`, `y` and the like, or the second of the tuple; else `batch` under
      such a name, or the second of a pair.
    - Weights: `outputs` under `weights` and the like, or the third of the tuple.

    Args:
        get: the user's own way, or None.
        outputs: what the step returned.
        batch: what it was given.
        from_logits: whether predictions are said to be logits.

    Raises:
        ValueError: if something is not there, or its name says that it is not what it was said to be. The message tells
            what there is.
        TypeError: if `get` returns something else than two or three tensors.
    """
    if get is not None:
        return _checked(get(outputs, batch))
    preds, target, weights = _in_outputs(outputs, from_logits)
    if target is None:
        target = _in_batch(batch)
    if preds is None or target is None:
        missing = "predictions" if preds is None else "targets"
        raise ValueError(
            f"`validation_step` must return {missing} under a known name, or (preds, target), got "
            f"{described(outputs)} for the batch {described(batch)}. Return {{'logits': ..., 'target': ...}}, or pass "
            "get=lambda outputs, batch: (preds, target)."
        )
    return Found(preds, target, weights)


def described(x: Any) -> str:
    """Say what there is: names and shapes."""
    if isinstance(x, Tensor):
        return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"
    if isinstance(x, Mapping):
        return f"{{{', '.join(f'{name!r}: {described(value)}' for name, value in x.items())}}}"
    if isinstance(x, list | tuple):
        return f"({', '.join(map(described, x))})"
    return "None" if x is None else type(x).__name__


def _in_outputs(outputs: Any, from_logits: bool) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if isinstance(outputs, Tensor):
        return (outputs if outputs.dim() else None), None, None
    if isinstance(outputs, list | tuple) and not hasattr(outputs, "_fields"):
        tensors = [x for x in outputs if isinstance(x, Tensor)]
        if len(tensors) > 1 and not tensors[0].dim():
            tensors = tensors[1:]
        preds, target, weights = [*tensors, None, None, None][:3] if len(tensors) <= 3 else (None, None, None)
        return preds, target, weights
    said, other = (LOGITS, PROBS) if from_logits else (PROBS, LOGITS)
    if (name := _name_in(outputs, other)) and not _name_in(outputs, said):
        raise ValueError(
            f"`from_logits` must be {not from_logits} for what `validation_step` returns as {name!r}, got "
            f"{from_logits}. Pass from_logits={not from_logits}, or return what it is under its name."
        )
    preds = _of(outputs, (*said, *NEUTRAL))
    return preds, _of(outputs, TARGETS), _of(outputs, WEIGHTS)


def _in_batch(batch: Any) -> Tensor | None:
    if isinstance(batch, list | tuple) and not hasattr(batch, "_fields"):
        return batch[1] if len(batch) == 2 and isinstance(batch[1], Tensor) else None
    return _of(batch, TARGETS)


def _name_in(x: Any, names: Sequence[str]) -> str | None:
    """The first of the names under which there is a tensor."""
    return next((name for name in names if isinstance(_get(x, name), Tensor)), None)


def _of(x: Any, names: Sequence[str]) -> Tensor | None:
    name = _name_in(x, names)
    return None if name is None else _get(x, name)


def _get(x: Any, name: str) -> Any:
    """What a mapping, a named tuple or an object has under a name."""
    return x.get(name) if isinstance(x, Mapping) else getattr(x, name, None)


def _checked(given: Any) -> Found:
    if not isinstance(given, list | tuple) or len(given) not in (2, 3) or not isinstance(given[0], Tensor):
        raise TypeError(f"`get` must return (preds, target) or (preds, target, weights), got {described(given)}.")
    return Found(*given)
