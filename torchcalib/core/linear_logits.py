"""Logits of hidden states and a linear head, such as that of a language model, which are never written to memory."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import linear

if TYPE_CHECKING:
    from torchcalib.ops.linear_softmax_stats import Head, Moments
    from torchcalib.ops.softmax_stats import Detail, RowStatistics


class LinearLogits(Tensor):
    """Logits `(..., N, V)` as a tensor without memory, for hidden states `(..., N, H)` and a `Head`.

    It has a shape, a dtype and a device, and takes the place of logits in the conversion of a batch. The statistics of
    rows are computed from the hidden states. Every operation that would need all logits raises TypeError.
    """

    hidden: Tensor
    head: "Head"
    vocab_group: Any

    @classmethod
    def of(cls, hidden: Tensor, head: "Head", vocab_group: Any, num_classes: int) -> "LinearLogits":
        """Return the logits of hidden states, for a head with `num_classes` classes on all ranks of the group."""
        shape = (*hidden.shape[:-1], num_classes)
        made: LinearLogits = Tensor._make_wrapper_subclass(cls, shape, dtype=hidden.dtype, device=hidden.device)
        made.hidden, made.head, made.vocab_group = hidden, head, vocab_group
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Raise TypeError for every operation on the values."""
        raise _needs_all()

    def __repr__(self) -> str:  # type: ignore[override]
        """Return shape, dtype and device, because there are no values."""
        return f"LinearLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def rows(self, target: Tensor, detail: "Detail", absent: Tensor | None) -> "RowStatistics":
        """Return the statistics of rows; those of the rows in the mask `absent` are 0, and are not computed on a CPU.

        On a GPU, the selection of rows would synchronise the device.
        """
        from torchcalib.ops.linear_softmax_stats import rows
        from torchcalib.ops.softmax_stats import RowStatistics

        hidden, target = self._present(absent), target if absent is None or not self.is_cpu else target[~absent]
        found = rows(hidden, target, self.head, detail=detail, vocab_group=self.vocab_group)
        return RowStatistics(*(self._filled(x, absent) for x in found))

    def largest(self, k: int, absent: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the k largest probabilities of each row and their classes `(..., N, k)`, without gradient."""
        from torchcalib.ops.linear_softmax_stats import largest

        self._check_constant("mode=TopK(k)")
        hidden = self._present(absent)
        found = largest(hidden, self.head, k, vocab_group=self.vocab_group)
        probabilities, classes = (self._filled(x, absent) for x in found)
        return probabilities, classes

    def bins(self, target: Tensor, n_bins: int, right: bool, absent: Tensor | None) -> Tensor:
        """Return sums over bins of all probabilities of each row `(..., N, 3, B)`, without gradient."""
        from torchcalib.ops.linear_softmax_stats import all_bins

        self._check_constant("Full-ECE")
        hidden, labels = self._present(absent), target if absent is None or not self.is_cpu else target[~absent]
        found = all_bins(hidden, labels, self.head, n_bins=n_bins, right=right, vocab_group=self.vocab_group)
        return self._filled(found, absent)

    def _check_constant(self, what: str) -> None:
        """Raise TypeError if a gradient is required."""
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (self.hidden, *self.head[:2])):
            raise TypeError(
                f"`hidden` and `weight` must have no gradient for {what}, got one that requires a gradient. Call it "
                "under torch.no_grad()."
            )

    def _present(self, absent: Tensor | None) -> Tensor:
        """Return hidden states without the rows of a mask on a CPU, and with 0 in these rows on other devices."""
        if absent is None:
            return self.hidden
        return self.hidden[~absent] if self.is_cpu else self.hidden.masked_fill(absent.unsqueeze(-1), 0)

    def _filled(self, x: Tensor, absent: Tensor | None) -> Tensor:
        """Return statistics `(n, *)` of the other rows as `(..., N, *)`, with 0 in the rows that `_present` removed."""
        if absent is None or not self.is_cpu:
            return x
        zeros = torch.zeros(*absent.shape, *x.shape[1:], dtype=x.dtype, device="cpu")
        return zeros.masked_scatter((~absent).reshape(*absent.shape, *[1] * (x.dim() - 1)), x)

    def moments(self, target: Tensor, alpha: Tensor) -> "Moments":
        """Return the moments of the logits under softmax(alpha z), `(K, N)` for K values of alpha."""
        from torchcalib.ops.linear_softmax_stats import moments

        head = self.head._replace(temperature=1 / alpha)
        return moments(self.hidden, target, head, vocab_group=self.vocab_group)

    def written(self) -> Tensor:
        """Return the logits, for few rows."""
        weight, bias, scale, cap, temperature = self.head
        x = linear(self.hidden, weight, bias) * (1 if scale is None else scale)
        x = x if cap is None else cap * (x / cap).tanh()
        return x if temperature is None else x / temperature

    def missing(self) -> Tensor:
        """Return a mask of rows with NaN, or with no logit above -inf `(..., N)`."""
        target = torch.zeros(self.shape[:-1], dtype=torch.int64, device=self.device)
        return self.detach().rows(target, "confidence", None).confidence.isnan()

    def _with_hidden(self, hidden: Tensor) -> "LinearLogits":
        return LinearLogits.of(hidden, self.head, self.vocab_group, self.shape[-1])

    def detach(self) -> "LinearLogits":
        """Return the same logits without gradients."""
        parts: Any = (x.detach() if isinstance(x, Tensor) else x for x in self.head)
        return LinearLogits.of(self.hidden.detach(), type(self.head)(*parts), self.vocab_group, self.shape[-1])

    def masked_fill(self, mask: Tensor, _: Any) -> "LinearLogits":
        """Return logits in which the rows of a mask `(..., N, 1)` have valid values."""
        return self._with_hidden(self.hidden.masked_fill(mask, 0))

    def reshape(self, *shape: Any) -> "LinearLogits":
        """Return logits with other axes of samples; the last axis must be that of the classes."""
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        return self._with_hidden(self.hidden.reshape(*sizes[:-1], self.hidden.shape[-1]))

    def __getitem__(self, index: Any) -> "LinearLogits":
        """Return a part of the samples, with all classes."""
        hidden = self.hidden[index]
        if hidden.shape[-1:] != self.hidden.shape[-1:]:
            raise _needs_all()
        return self._with_hidden(hidden)


def linear_logits(
    hidden: Any,
    weight: Any,
    *,
    bias: Any = None,
    logit_scale: float | None = None,
    softcap: float | None = None,
    temperature: float | Tensor | None = None,
    vocab_group: Any = None,
) -> LinearLogits:
    """Return the logits of hidden states and a linear head, without computing them.

    The result takes the place of logits in `update` of metrics, collections and `ReportBuilder`, and in the steps and
    outputs of Lightning modules and Hugging Face models, from which integrations compute metrics. Row statistics are
    computed in blocks; see `torchcalib.functional.from_hidden`, also for the metrics that are supported.

    Args:
        hidden: input of the head `(..., N, H)`, floating. A `DTensor` is gathered.
        weight: weight of the head `(V, H)` in the dtype of `hidden`. A `DTensor` is gathered, or with `vocab_group`
            its local part is used.
        bias: bias of the head `(V,)`, or None.
        logit_scale: positive factor of the logits, or None.
        softcap: positive soft cap of the logits, or None.
        temperature: positive temperature, or None for 1.
        vocab_group: process group whose ranks have consecutive parts of the classes, or None for a whole head.

    Returns:
        Logits `(..., N, V)`, a tensor without values. Operations that need all logits raise TypeError.

    Raises:
        TypeError: for an invalid type or dtype.
        ValueError: for an invalid shape, device or value, or an empty weight.

    Gradient: in `hidden`, `weight` and `bias`, through the statistics.

    Example:
        >>> import torch
        >>> import torchcalib as tc
        >>> logits = linear_logits(torch.randn(16, 8), torch.randn(1000, 8))
        >>> logits.shape
        torch.Size([16, 1000])
        >>> tc.nll(logits, torch.randint(0, 1000, (16,)), from_logits=True) > 0
        tensor(True)
    """
    for name, x in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if not isinstance(x, Tensor) and not (name == "bias" and x is None):
            raise TypeError(
                f"`{name}` must be a torch.Tensor, got {type(x).__name__}. Convert it with torch.as_tensor."
            )
    hidden = _plain(hidden, False)
    weight, bias = _plain(weight, vocab_group is not None), _plain(bias, vocab_group is not None)
    if not hidden.is_floating_point():
        raise TypeError(
            f"`hidden` must be floating, got {hidden.dtype}. Pass the input of the head, not token numbers."
        )
    if hidden.dim() < 2:
        raise ValueError(f"`hidden` must have shape (..., N, H), got {tuple(hidden.shape)}. Add the axis of samples.")
    if not weight.numel():
        raise ValueError(
            f"`weight` must have values, got shape {tuple(weight.shape)}. A parameter that ZeRO-3 or FSDP has "
            "partitioned is empty: gather it with deepspeed.zero.GatheredParameters([weight]) or "
            "FSDP.summon_full_params(model)."
        )
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"`weight` must have shape (V, {hidden.shape[-1]}) for `hidden` {tuple(hidden.shape)}, got "
            f"{tuple(weight.shape)}. Pass model.get_output_embeddings().weight, or transpose it."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"`bias` must have shape ({len(weight)},), got {tuple(bias.shape)}. Pass one value for each class."
        )
    for name, x in (("weight", weight), ("bias", bias)):
        if x is not None and x.dtype != hidden.dtype:
            raise TypeError(
                f"`{name}` must have the dtype of `hidden` ({hidden.dtype}), got {x.dtype}. Convert one of them."
            )
        if x is not None and x.device != hidden.device:
            raise ValueError(
                f"`{name}` must be on the device of `hidden` ({hidden.device}), got {x.device}. Move one of them."
            )
    for name, value in (("logit_scale", logit_scale), ("softcap", softcap), ("temperature", temperature)):
        if value is not None:
            if isinstance(value, bool) or not (
                isinstance(value, int | float) or (isinstance(value, Tensor) and not value.dim())
            ):
                found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise TypeError(f"`{name}` must be a number or None, got {found}. Pass a positive float.")
            if not isinstance(value, Tensor) and not 0 < value < float("inf"):
                raise ValueError(f"`{name}` must be positive and finite, got {value:g}. Pass None to omit it.")
    num_classes = len(weight)
    if vocab_group is not None:
        total = torch.tensor(num_classes, device=hidden.device)
        torch.distributed.all_reduce(total, group=vocab_group)
        num_classes = int(total)
    from torchcalib.ops.linear_softmax_stats import Head

    return LinearLogits.of(hidden, Head(weight, bias, logit_scale, softcap, temperature), vocab_group, num_classes)


def _plain(x: Any, is_local: bool) -> Any:
    """Return a `DTensor` as a plain tensor: its local part, or the whole tensor, gathered over its processes."""
    if x is None or not hasattr(x, "full_tensor"):
        return x
    return x.to_local() if is_local else x.full_tensor()


def _needs_all() -> TypeError:
    return TypeError(
        "`hidden` must be given to metrics of row statistics (log-probability of the label, squared error, entropy, "
        "top class) or to temperature scaling, got one that needs all class probabilities. Pass the logits to "
        "`update`, `fit` or the function: hidden @ weight.T."
    )
