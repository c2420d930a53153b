"""Metrics of hidden states and a linear head, without the logits."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from torchcalib.core.linear_logits import linear_logits

R = TypeVar("R")


def from_hidden(
    metric: Callable[..., R],
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    logit_scale: float | None = None,
    softcap: float | None = None,
    temperature: float | Tensor | None = None,
    vocab_group: Any = None,
    **options: Any,
) -> R:
    """Return the value of a metric function for hidden states and a linear head, without writing the logits.

    The logits of a row h are z = c tanh(s (W h + b) / c) / T with soft cap c, logit scale s and temperature T; without
    a soft cap, z = s (W h + b) / T. They are computed in blocks, whose statistics are merged. Memory is therefore a few
    megabytes for any number of classes V, where the logits of 8,192 tokens and 150,000 classes take 5 GB in float32.

    Supported are all metrics of the label log-probability, squared error, entropy and top class: scores, errors of the
    top label, and selective prediction. Log-odds are those of the confidence: they are infinite above a confidence of
    1 - 1e-16.

    Args:
        metric: metric function with options, such as `torchcalib.ece`.
        hidden: input of the head `(..., N, H)`, floating.
        weight: weight of the head `(V, H)` in the dtype of `hidden`. A `DTensor` is gathered.
        target: labels in [0, V), integers `(..., N)`.
        bias: bias of the head `(V,)`, or None.
        logit_scale: positive factor of the logits, as in Cohere, or None.
        softcap: positive soft cap of the logits, as in Gemma 2, or None.
        temperature: positive temperature, or None for 1.
        vocab_group: process group whose ranks have consecutive parts of the classes in `weight` and `bias`, and the
            same hidden states and labels: a tensor-parallel head. Every rank must call this function. The local part of
            a `DTensor` is used. None for a whole head.
        **options: options of the metric, such as `n_bins`, `ignore_index` or `weights`.

    Returns:
        The value that `metric` returns for the logits.

    Raises:
        TypeError: for an invalid dtype, soft targets, or a metric that needs all class probabilities.
        ValueError: for an invalid shape, device or value, or an empty weight.

    Gradient: in `hidden`, `weight` and `bias`, as that of `metric` in the logits.

    Example:
        >>> import torch
        >>> import torchcalib as tc
        >>> hidden, weight = torch.randn(16, 8), torch.randn(1000, 8)
        >>> labels = torch.randint(0, 1000, (16,))
        >>> value = from_hidden(tc.nll, hidden, weight, labels)
        >>> torch.allclose(value, tc.nll(hidden @ weight.T, labels, from_logits=True))
        True
    """
    preds = linear_logits(
        hidden, weight, bias=bias, logit_scale=logit_scale, softcap=softcap, temperature=temperature,
        vocab_group=vocab_group,
    )  # fmt: skip
    return metric(preds, target, **{"task": "multiclass", "from_logits": True, **options})
