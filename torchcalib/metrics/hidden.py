"""Updates of metrics with hidden states and a linear head, without the logits."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from torchcalib.core.linear_logits import linear_logits


class UpdatesFromHidden:
    """Base class for objects whose updates accept logits, and therefore also hidden states and a linear head."""

    update: Callable[..., None]

    def update_from_hidden(
        self,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        *,
        bias: Tensor | None = None,
        logit_scale: float | None = None,
        softcap: float | None = None,
        temperature: float | Tensor | None = None,
        vocab_group: Any = None,
        **columns: Any,
    ) -> None:
        """Add a batch of hidden states, the input of a linear head, without writing the logits.

        Metrics must have `from_logits=True`. The state is that after `update` with the logits, up to rounding. A
        collection makes one pass over the blocks of the logits for all metrics.

        Args:
            hidden: Input of the head `(..., N, H)`.
            weight: Weight of the head `(V, H)`.
            target: Labels `(..., N)`.
            bias, logit_scale, softcap, temperature, vocab_group: See `torchcalib.functional.from_hidden`.
            **columns: Further arguments of `update`, such as `weights` or `clusters`.

        Raises:
            TypeError: For an invalid dtype, or if a metric needs all class probabilities: call `update`.
            ValueError: See `update`. Also for an empty weight.
        """
        preds = linear_logits(
            hidden, weight, bias=bias, logit_scale=logit_scale, softcap=softcap, temperature=temperature,
            vocab_group=vocab_group,
        )  # fmt: skip
        self.update(preds, target, **columns)
