"""Find predictions, targets and weights in the output of a model or validation step, and in the input batch."""

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any, NamedTuple

from torch import Tensor, nn

from torchcalib.io.errors import short_name
from torchcalib.io.names import LOGITS, NEUTRAL, PROBS, TARGETS, WEIGHTS

Get = Callable[[Any, Any], Sequence[Tensor | None]]


class Found(NamedTuple):
    """Predictions, targets and weights of a batch."""

    preds: Tensor
    target: Tensor
    weights: Tensor | None = None


def found_by(get: Get | None, outputs: Any, batch: Any, from_logits: bool) -> Found:
    """Return the result of `get(outputs, batch)`. If `get` is None, find the tensors by usual names and positions.

    - Predictions: `outputs["logits"]`, `["probs"]`, `["preds"]` or another name of `torchcalib.io.names`; the first
      tensor of a tuple, after an optional scalar loss; or `outputs` itself.
    - Targets: `outputs["targets"]`, `["labels"]`, `["y"]` or a similar name; or the second tensor of the tuple. If
      there are none, the same names in `batch`, or its second element if it is a pair.
    - Weights: `outputs["weights"]` or a similar name; or the third tensor of the tuple.

    Mappings are searched by key, named tuples and other objects by attribute. Weights may be None. Missing predictions
    or targets, and a name that contradicts `from_logits`, raise a ValueError.
    """
    if get is not None:
        given = get(outputs, batch)
        if not isinstance(given, list | tuple) or len(given) not in (2, 3) or not isinstance(given[0], Tensor):
            raise TypeError(f"`get` must return (preds, target) or (preds, target, weights), got {described(given)}.")
        return Found(*given)
    preds: Tensor | None
    target: Tensor | None
    if isinstance(outputs, Tensor) or _is_plain_tuple(outputs):
        tensors = [x for x in ([outputs] if isinstance(outputs, Tensor) else outputs) if isinstance(x, Tensor)]
        tensors = tensors[1:] if tensors and not tensors[0].dim() else tensors  # without a scalar loss
        preds, target, weights = [*tensors, None, None, None][:3] if len(tensors) <= 3 else (None, None, None)
    else:
        right = LOGITS if from_logits else PROBS
        if not tensor_named(outputs, right)[0]:
            _check_kind(outputs, from_logits, "`validation_step`")
        preds, target, weights = (tensor_named(outputs, names)[1] for names in ((*right, *NEUTRAL), TARGETS, WEIGHTS))
    if target is None and _is_plain_tuple(batch):
        target = batch[1] if len(batch) == 2 and isinstance(batch[1], Tensor) else None
    elif target is None:
        target = tensor_named(batch, TARGETS)[1]
    if preds is None or target is None:
        missing = "predictions" if preds is None else "targets"
        raise ValueError(
            f"`validation_step` must return {missing} under a known name, or (preds, target), got "
            f"{described(outputs)} for the batch {described(batch)}. Return {{'logits': ..., 'target': ...}}, or pass "
            "get=lambda outputs, batch: (preds, target)."
        )
    return Found(preds, target, weights)


def described(x: Any) -> str:
    """Describe nested tensors by name, dtype and shape, for error messages, in at most 200 characters."""
    return short_name(_described(x), 200)


def _described(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"
    if isinstance(x, Mapping):
        return f"{{{', '.join(f'{name!r}: {_described(value)}' for name, value in x.items())}}}"
    if isinstance(x, list | tuple):
        return f"({', '.join(map(_described, x))})"
    return "None" if x is None else type(x).__name__


def _is_plain_tuple(x: Any) -> bool:
    return isinstance(x, list | tuple) and not hasattr(x, "_fields")


def predictions_in(outputs: Any, from_logits: bool | None) -> tuple[Tensor | None, bool | None]:
    """Return the predictions in the output of a model, and whether their name implies logits; None if unknown.

    The predictions are the output itself, the only tensor in a tuple, or a tensor with a usual name.
    """
    if isinstance(outputs, Tensor):
        return outputs, None
    if _is_plain_tuple(outputs):
        tensors = [x for x in outputs if isinstance(x, Tensor)]
        return (tensors[0] if len(tensors) == 1 else None), None
    for is_logits in (True, False) if from_logits is None else (from_logits,):
        name, preds = tensor_named(outputs, LOGITS if is_logits else PROBS)
        if name is not None:
            return preds, is_logits
    name, preds = tensor_named(outputs, NEUTRAL)
    if from_logits is not None and name is None:
        _check_kind(outputs, from_logits, "the model")
    return preds, None


def call_by_name(model: Callable[..., Any], entries: Mapping[str, Any]) -> Any:
    """Call a model with the entries of a batch that have the names of its arguments.

    If none match, pass the only tensor, or all entries for `**kwargs`.
    """
    parameters = parameters_of(model)
    kinds = {parameter.kind for parameter in parameters.values()}
    known = {name: value for name, value in entries.items() if name in parameters}
    if known:
        return model(**known)
    tensors = [value for value in entries.values() if isinstance(value, Tensor)]
    if len(tensors) == 1:
        return model(tensors[0])
    if Parameter.VAR_KEYWORD in kinds:
        return model(**entries)
    raise ValueError(
        f"`dataloader` must yield one input, or inputs with the names of the model arguments "
        f"({', '.join(parameters)}), got {described(entries)}. Pass predict=lambda model, batch: (preds, target)."
    )


def parameters_of(model: Callable[..., Any]) -> Mapping[str, Parameter]:
    """Return the parameters of a model by name: those of `forward` for a module."""
    return signature(model.forward if isinstance(model, nn.Module) else model).parameters


def tensor_named(x: Any, names: Sequence[str]) -> tuple[str | None, Tensor | None]:
    """Return the first of `names` under which `x` contains a tensor, and this tensor; else (None, None)."""
    for name in names:
        value = x.get(name) if isinstance(x, Mapping) else getattr(x, name, None)
        if isinstance(value, Tensor):
            return name, value
    return None, None


def _check_kind(outputs: Any, from_logits: bool, origin: str) -> None:
    name, _ = tensor_named(outputs, PROBS if from_logits else LOGITS)
    if name:
        raise ValueError(
            f"`from_logits` must be {not from_logits} for the output {name!r} of {origin}, got {from_logits}. "
            f"Pass from_logits={not from_logits}, or rename the output."
        )
