"""Predictions of the next tokens by a causal language model, if possible without the logits of the vocabulary."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchcalib.core.linear_logits import LinearLogits, linear_logits
from torchcalib.integrations.outputs import call_by_name, described, parameters_of, predictions_in, tensor_named
from torchcalib.io.names import TARGETS

_SCALES = ("logit_scale", "lm_head_multiplier")  # factors of the logits, as in Cohere and in Falcon-H1
_DIVISORS = ("logits_scaling",)  # as in Granite
_CAPS = ("final_logit_softcapping", "logits_soft_cap")  # as in Gemma 2 and in RecurrentGemma
_TOKENS_COMPARED = 8
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}  # of logits, relative to the largest; 5% for half precision


class NextTokens:
    """Function from a causal language model and a batch to predictions and labels of the next tokens.

    The body and the head of a Hugging Face model are called separately, so that logits are never written. The first
    batch compares a few logits of both ways. If they differ, because a model changes the logits in an unknown way, or
    if it has no linear head, the logits of each batch are written.
    """

    def __init__(self, ignore_index: int) -> None:
        self.ignore_index = ignore_index
        # function from inputs to logits; None before the first batch
        self._logits: Callable[[Mapping[str, Any]], Tensor] | None = None

    def __call__(self, model: Callable[..., Any], batch: Any) -> tuple[Tensor, Tensor]:
        """Return logits `(B, T - 1, V)` of the tokens that follow each position, and their labels `(B, T - 1)`."""
        inputs, labels = self._split(batch)
        if self._logits is None:
            self._logits = self._fused(model, inputs) or (lambda given: _written(model, given))
        logits = self._logits(inputs)
        if logits.shape[:-1] != labels.shape:
            raise ValueError(
                f"`model` must return logits (B, T, V) for `labels` {tuple(labels.shape)}, got {tuple(logits.shape)}. "
                "Pass predict=lambda model, batch: (preds, target) with task='multiclass'."
            )
        return logits[:, :-1], labels[:, 1:]

    def _split(self, batch: Any) -> tuple[dict[str, Any], Tensor]:
        """Return the inputs of the model and the labels `(B, T)` of a batch, which are not shifted."""
        entries = batch._asdict() if hasattr(batch, "_asdict") else batch
        tokens = entries.get("input_ids") if isinstance(entries, Mapping) else None
        if not isinstance(tokens, Tensor) or tokens.dim() != 2:
            raise ValueError(
                "`dataloader` must yield mappings with 'input_ids' (B, T) for task='causal_lm', got "
                f"{described(batch)}. Pass the output of the tokenizer with return_tensors='pt'."
            )
        name, labels = tensor_named(entries, TARGETS)
        inputs = {key: value for key, value in entries.items() if key != name}
        if labels is not None:
            return inputs, labels
        labels, mask = tokens.long(), entries.get("attention_mask")
        if mask is not None:  # the first token after padding on the left has no context
            has_context = torch.cat((torch.zeros_like(mask[:, :1]), mask[:, :-1]), 1)
            labels = labels.masked_fill((mask == 0) | (has_context == 0), self.ignore_index)
        return inputs, labels

    @staticmethod
    def _fused(model: Any, inputs: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Tensor] | None:
        """Return a function from inputs to logits that are not written, if it agrees with the model; otherwise None."""
        inner = model
        for wrapper in ("_orig_mod", "module"):  # the layers within wrappers of torch and PEFT are those of the wrapper
            inner = getattr(inner, wrapper, inner)
        inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
        layer = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
        body = getattr(inner, "base_model", inner)
        if not isinstance(layer, nn.Linear) or body is inner:
            return None
        how = _transformation(inner)

        def logits(given: Mapping[str, Any]) -> LinearLogits:
            outputs = _called(body, given)
            hidden = outputs[0] if isinstance(outputs, tuple) else outputs.last_hidden_state
            device = hidden.device.type
            dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else layer.weight.dtype
            bias = None if layer.bias is None else layer.bias.to(dtype)
            return linear_logits(hidden.to(dtype), layer.weight.to(dtype), bias=bias, **how)

        few = _first(inputs)
        expected, found = _written(model, few).double(), logits(few).written().double()
        error, largest = (found - expected).abs().amax(), expected.abs().amax()
        return logits if bool(error <= _TOLERANCE.get(layer.weight.dtype, 0.05) * largest) else None


def _transformation(model: Any) -> dict[str, float]:
    """Return the logit scale and the soft cap in the configuration of a Hugging Face model."""
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config

    def found(names: tuple[str, ...]) -> list[float]:
        values = (getattr(config, name, None) for name in names)
        return [float(value) for value in values if isinstance(value, int | float) and value and value is not True]

    scales, caps = [*found(_SCALES), *(1 / x for x in found(_DIVISORS))], found(_CAPS)
    return {**({"logit_scale": scales[0]} if scales else {}), **({"softcap": caps[0]} if caps else {})}


def _first(inputs: Mapping[str, Any]) -> dict[str, Any]:
    shape = inputs["input_ids"].shape

    def part(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.shape[:1] != shape[:1]:
            return x
        return x[:1, :_TOKENS_COMPARED] if x.shape[:2] == shape else x[:1]

    return {name: part(x) for name, x in inputs.items()}


def _written(model: Callable[..., Any], inputs: Mapping[str, Any]) -> Tensor:
    outputs = _called(model, inputs)
    logits, _ = predictions_in(outputs, True)
    if logits is None:
        raise ValueError(
            f"`model` must return a tensor, or predictions as 'logits', got {described(outputs)}. Pass "
            "predict=lambda model, batch: (preds, target) with task='multiclass'."
        )
    return logits


def _called(model: Callable[..., Any], inputs: Mapping[str, Any]) -> Any:
    """Call a model with the entries that have the names of its arguments, without a cache of keys and values."""
    without = {"use_cache": False} if "use_cache" in parameters_of(model) else {}
    return call_by_name(model, {**inputs, **without})
