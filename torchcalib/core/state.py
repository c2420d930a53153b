"""Accumulation, merging, saving and synchronisation of metric states across distributed processes (ranks).

`SumState` states are one tensor and merge by addition. `SampleState` states are lists of samples and merge by
concatenation. States are immutable: each operation returns a new state, which may share tensors with its operands.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchcalib.core.pieces import Piece
from torchcalib.core.predictions import Predictions
from torchcalib.core.ranked import ExactSample, RankedSample
from torchcalib.core.sums import SumsAccumulator, check_sums, has_noise_flag, with_noise_row

S = TypeVar("S", covariant=True)

N_IGNORED = 2
"""Number of counts in each state: ignored invalid rows, and ignored missing rows (`nan_policy="drop"`)."""


def check_counts(name: str, counts: Tensor) -> None:
    """Raise ValueError unless all numbers of a saved state are counts."""
    _check(name, "be counts", counts, (counts >= 0) & (counts == counts.round()) & counts.isfinite())


def _check(name: str, rule: str, values: Tensor, is_valid: Tensor) -> None:
    if not bool(is_valid.all()):
        first = values.expand(is_valid.shape)[~is_valid][0].item()
        raise ValueError(f"`state` must be possible: {name} must {rule}, got {first:g}. The state is corrupt.")


def ignored_counts(p: Predictions, like: Tensor) -> Tensor:
    """Return the numbers of ignored invalid and ignored missing rows in a batch, `(2,)` in the dtype of `like`."""
    if p.n_invalid is None and p.n_dropped is None:
        return like.new_zeros(N_IGNORED)
    counts = [like.new_zeros(1) if n is None else n.to(like).reshape(1) for n in (p.n_invalid, p.n_dropped)]
    return torch.cat(counts)


@dataclass(frozen=True)
class SumState(Generic[S]):
    """Operations on the state of a metric that is computed from sums: one float64 tensor `(n,)`.

    The state contains the two counts of `ignored_counts`, `Sums.noise_flag` if present, and the flattened sums.
    """

    accumulator: SumsAccumulator[S]  # computes the sums
    shape: tuple[int, ...]  # shape of the sums
    names: ClassVar[tuple[str, ...]] = ("sums",)  # names of the saved parts
    has_payload: ClassVar[bool] = False
    """Whether a rank sends more than `announce` returns. Otherwise an all-reduce adds the states of all ranks."""
    is_additive = True
    """Whether sums do not depend on the order of rows."""

    def empty(self) -> Tensor:
        """Return the state without data, a tensor of zeros."""
        return torch.zeros(self.size, dtype=torch.float64)

    @cached_property
    def size(self) -> int:
        """Number n of entries of the state."""
        return self._offset + math.prod(self.shape)

    @cached_property
    def _offset(self) -> int:
        return N_IGNORED + (math.prod(self.shape[:-2]) if has_noise_flag(self.accumulator) else 0)

    def join(self, parts: Sequence[Any]) -> Any:
        """Return a state with the given parts, in the order of `names`. Subclasses have additional parts."""
        return parts[0]

    def parts(self, state: Any) -> Any:
        """Return the parts of a state to save: only the state itself."""
        return [state]

    def from_predictions(self, p: Predictions) -> Tensor:
        """Return the state for one batch of predictions."""
        statistic = self.accumulator.from_predictions(p)
        sums, noise_flag = (
            statistic.sums.reshape(-1),
            () if statistic.noise_flag is None else (statistic.noise_flag.reshape(-1),),
        )
        return torch.cat((ignored_counts(p, sums), *noise_flag, sums))

    def add_piece(self, piece: Piece, total: Any) -> bool:
        """Add a piece to a state, a numpy array, in place. Return False for an invalid piece; see `core.pieces`."""
        accumulator: Any = self.accumulator
        sums = total[self._offset :].reshape(self.shape)
        if piece.copies or self._offset == N_IGNORED:
            return bool(accumulator.add_piece(piece, sums))
        # The flag is the total weight of rows whose weights are not numbers of copies. The differences of bins are
        # never negative, and not 0 for a small weight in an empty bin.
        part = ... if piece.only_group is None else piece.only_group
        weights, flags = sums[part][..., 0, :], total[N_IGNORED : self._offset].reshape(self.shape[:-2])
        before = weights.copy()
        is_valid = bool(accumulator.add_piece(piece, sums))
        flags[part] += (weights - before).sum(-1)
        return is_valid

    def add(self, state: Tensor, more: Tensor) -> Tensor:
        """Return the sum of two states, on the device of the first."""
        return state + more.to(state)

    def detach(self, state: Tensor) -> Tensor:
        """Return the state without its autograd graph."""
        return state.detach()

    def n_ignored(self, state: Tensor) -> Tensor:
        """Return the numbers of ignored invalid rows and ignored missing rows, float64 `(2,)`."""
        return state[:N_IGNORED]

    def statistic(self, state: Tensor) -> S:
        """Return the statistic from which metrics are computed, for example `BinStats`."""
        sums, noise_flag = self._sums_of(state)
        return self.accumulator.wrap(sums if noise_flag is None else with_noise_row(sums, noise_flag))

    def of_batch(self, state: Tensor) -> Any:
        """Return the statistic of the state of a batch, as the accumulator computes it from predictions."""
        sums, noise_flag = self._sums_of(state)
        statistic: Any = self.accumulator.wrap(sums)
        return replace(statistic, noise_flag=noise_flag)

    def _sums_of(self, state: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the sums, and `Sums.noise_flag` or None."""
        has_flag = has_noise_flag(self.accumulator)
        noise_flag = state[N_IGNORED : self._offset].reshape(self.shape[:-2]) if has_flag else None
        return state[self._offset :].reshape(self.shape), noise_flag

    def check(self, parts: Sequence[Any], like: Tensor) -> Tensor | None:
        """Return a copy of a saved state on the device of `like`, or None unless it has valid float64 sums."""
        (state,) = parts
        if not isinstance(state, Tensor) or state.shape != like.shape or state.dtype != torch.float64:
            return None
        self._check_sums(state)
        return state.detach().to(like, copy=True)

    def _check_sums(self, state: Tensor) -> None:
        """Raise ValueError unless the numbers of ignored rows and the sums are possible."""
        check_counts("the numbers of ignored rows", state[:N_IGNORED])
        sums, noise_flag = self._sums_of(state)
        check_sums(sums, self.accumulator.ranges, noise_flag)

    def announce(self, state: Any) -> Tensor:
        """Return the numbers that a rank sends first, float64 `(n,)`: the state itself. n is equal on all ranks."""
        announced: Tensor = state.detach()
        return announced

    def payload(self, state: Any) -> Tensor:
        """Return an empty tensor, uint8 `(0,)`, because the sums are announced."""
        return torch.zeros(0, dtype=torch.uint8, device=state.device)

    def payload_size(self, announced: Tensor) -> int:  # noqa: ARG002
        """Return the length of the `payload` of the rank that sent `announced`: 0."""
        return 0

    def merged(self, announced: Sequence[Tensor], payloads: Sequence[Tensor]) -> Any:  # noqa: ARG002
        """Return the merged state of all ranks, which is the sum of their states."""
        return torch.stack(list(announced)).sum(0)


class Samples(NamedTuple):
    """State that stores samples in chunks. Each list contains one tensor `(..., n)` for each chunk of n samples."""

    scores: list[Tensor]  # see `RankedSample`; float32 or float64
    outcomes: list[Tensor]  # uint8 labels, or floating soft targets
    # Weight of each sample: int64 for copies, float64 for whole floating weights; `(..., 0)` without weights
    weights: list[Tensor]
    n_ignored: Tensor  # numbers of ignored invalid rows and ignored missing rows, float64 `(2,)`


_SCORE_DTYPES = (torch.float32, torch.float64)
_OUTCOME_DTYPES = (torch.uint8, torch.float32, torch.float64)
_WEIGHT_DTYPES = (torch.int64, torch.float64)


@dataclass(frozen=True)
class SampleState:
    """Operations on the state of a metric that requires all samples; see `Samples`.

    A sample occupies 5 bytes for float32 (9 for float64 and multi-class logits), and 8 more with weights. A new chunk
    is concatenated with chunks of at most twice its size. The number of chunks is therefore small, and each of N
    samples is copied about log2(N) times.
    """

    accumulator: ExactSample
    leading_shape: tuple[int, ...]  # shape of the batch axes
    from_logits: bool  # whether scores are log-odds
    names: ClassVar[tuple[str, ...]] = Samples._fields  # names of the saved parts
    has_payload: ClassVar[bool] = True
    _more_dtypes: ClassVar[tuple[tuple[torch.dtype, ...], ...]] = ()
    """Dtypes of the columns that subclasses add after scores, outcomes and weights."""

    def empty(self) -> Any:
        """Return a state without chunks."""
        return self._state_from([], torch.zeros(N_IGNORED, dtype=torch.float64))

    def join(self, parts: Sequence[Any]) -> Any:
        """Return a state with the given parts, in the order of `names`. Subclasses have additional parts."""
        return Samples(*parts)

    def parts(self, state: Any) -> Any:
        """Return the parts of a state to save: the state itself, which is a tuple."""
        return state

    def from_predictions(self, p: Predictions) -> Any:
        """Return the state for one batch, with one chunk that shares no memory with the batch.

        On the CPU, ignored rows are removed. On a GPU they remain with score NaN, because removal would synchronise.
        """
        score, *others = self._chunk(p)
        if p.weights is not None and score.device.type == "cpu" and score.dim() == 1:
            keep = ~score.detach().isnan()
            chunk = [score[keep], *(c[keep] if c.numel() else c for c in others)]
        else:
            chunk = [score.clone(), others[0].clone(), *others[1:]]
        return self._state_from([chunk], ignored_counts(p, score.new_zeros(0, dtype=torch.float64)))

    def _chunk(self, p: Predictions) -> list[Tensor]:
        """Return scores, outcomes and weights of a batch. Scores and outcomes may share memory with it."""
        sample = self.accumulator.from_predictions(p)
        score = sample.score
        none = score.new_zeros((*score.shape[:-1], 0), dtype=torch.int64)
        dtype = _WEIGHT_DTYPES[not sample.copies]
        n = none if sample.n is None else sample.n.to(dtype, copy=True, memory_format=torch.contiguous_format)
        outcome = sample.positives
        if sample.n is not None:  # store the mean outcome, which does not depend on the weight
            outcome = (outcome / sample.n.clamp(min=1)).to(torch.uint8 if p.has_labels else score.dtype)
        return [score, outcome, n]

    def _state_from(self, chunks: Sequence[Sequence[Tensor]], n_ignored: Tensor) -> Any:
        columns = zip(*chunks, strict=True) if chunks else [()] * (len(self.names) - 1)
        return self.join([*map(list, columns), n_ignored])

    def add(self, state: Any, more: Any) -> Any:
        """Return a state with the chunks of two states, in which chunks of similar sizes are concatenated."""
        chunks = _chunks_of(state)
        for chunk in _chunks_of(more):
            together, size = [chunk], chunk[0].shape[-1]
            while chunks and chunks[-1][0].device == chunk[0].device and chunks[-1][0].shape[-1] <= 2 * size:
                together.insert(0, chunks.pop())
                size += together[0][0].shape[-1]
            chunks.append(_joined(together))
        return self._state_from(chunks, state.n_ignored + more.n_ignored.to(state.n_ignored))

    def detach(self, state: Any) -> Any:
        """Return the state without its autograd graph."""
        columns = [[t.detach() if t.requires_grad else t for t in column] for column in state[:-1]]
        return self.join([*columns, state.n_ignored.detach()])

    def n_ignored(self, state: Any) -> Tensor:
        """Return the numbers of ignored invalid rows and ignored missing rows, float64 `(2,)`."""
        n_ignored: Tensor = state.n_ignored
        return n_ignored

    def statistic(self, state: Any) -> Any:
        """Return all samples as a `RankedSample`."""
        return self._sample(*self._whole(state)[:3])

    def _sample(self, score: Tensor, outcome: Tensor, n: Tensor) -> RankedSample:
        if not n.shape[-1]:
            return RankedSample(score, outcome, None, self.from_logits)
        wide = n.to(torch.float64)
        return RankedSample(score, wide * outcome, wide, self.from_logits, copies=n.dtype == torch.int64)

    def check(self, parts: Sequence[Any], like: Any) -> Any:
        """Return a copy of a saved state on the device of `like`, or None if its parts are not valid."""
        *lists, n_ignored = parts
        if not all(isinstance(part, list | tuple) for part in lists) or len({len(part) for part in lists}) != 1:
            return None
        if not isinstance(n_ignored, Tensor) or (n_ignored.shape, n_ignored.dtype) != ((N_IGNORED,), torch.float64):
            return None
        for part, dtypes in zip(
            lists, (_SCORE_DTYPES, _OUTCOME_DTYPES, _WEIGHT_DTYPES, *self._more_dtypes), strict=True
        ):
            if not all(isinstance(chunk, Tensor) and chunk.dtype in dtypes for chunk in part):
                return None
        device = like.n_ignored.device
        for score, outcome, n, *_ in zip(*lists, strict=True):
            fits = score.shape == outcome.shape and score.shape[:-1] == self.leading_shape == n.shape[:-1]
            if not fits or n.shape[-1] not in (0, score.shape[-1]):
                return None
        check_counts("the numbers of ignored rows", n_ignored)
        for score, outcome, n, *_ in zip(*lists, strict=True):
            self._check_chunk(score, outcome, n)
        columns = [[t.detach().to(device, copy=True) for t in part] for part in lists]
        return self.join([*columns, n_ignored.detach().to(device, copy=True)])

    def _check_chunk(self, score: Tensor, outcome: Tensor, n: Tensor) -> None:
        """Raise ValueError unless scores, outcomes and weights of samples are possible. An ignored score is NaN."""
        ignored = score.isnan()
        if not self.from_logits:
            _check("scores", "be in [0, 1]", score, ignored | ((score >= 0) & (score <= 1)))
        _check("outcomes", "be in [0, 1]", outcome, ignored | ((outcome >= 0) & (outcome <= 1)))
        _check("weights", "be counts up to 2^53", n, (n >= 0) & (n == n.round()) & (n <= 2**53))

    def announce(self, state: Any) -> Tensor:
        """Return the numbers that a rank sends first, float64 `(6,)`.

        These are `n_ignored`, the number of samples, and the indices of the score and outcome dtypes. The last number
        is 0 without weights, else 1 plus the index of their dtype.
        """
        score, outcome, n, *_ = self._whole(state)
        dtypes = [_SCORE_DTYPES.index(score.dtype), _OUTCOME_DTYPES.index(outcome.dtype)]
        weighted = 1 + _WEIGHT_DTYPES.index(n.dtype) if n.shape[-1] else 0
        described = state.n_ignored.new_tensor([score.shape[-1], *dtypes, weighted])
        return torch.cat((state.n_ignored.detach(), described))

    def payload(self, state: Any) -> Tensor:
        """Return the bytes of all samples in this state for an all-gather, uint8 `(n,)`."""
        columns = [t.detach().contiguous().flatten().view(torch.uint8) for t in self._whole(state)]
        return torch.cat([column.to(state.n_ignored.device) for column in columns])

    def payload_size(self, announced: Tensor) -> int:
        """Return the length of the `payload` of the rank that sent `announced`."""
        return sum(_n_bytes(dtype, shape) for dtype, shape in self._columns(announced[N_IGNORED:].tolist()))

    def merged(self, announced: Sequence[Tensor], payloads: Sequence[Tensor]) -> Any:
        """Return the merged state of all ranks, with one chunk for each rank that contains samples."""
        chunks: list[list[Tensor]] = []
        stacked = torch.stack(list(announced))
        for row, payload in zip(stacked[:, N_IGNORED:].tolist(), payloads, strict=True):
            if row[0] == 0:
                continue
            start, chunk = 0, []
            for dtype, shape in self._columns(row):
                end = start + _n_bytes(dtype, shape)
                # Clone, because a view with another dtype must be aligned to its item size.
                chunk.append(payload[start:end].clone().view(dtype).reshape(shape))
                start = end
            chunks.append(chunk)
        return self._state_from(chunks, stacked[:, :N_IGNORED].sum(0))

    def _columns(self, row: Sequence[float]) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        """Return dtype and shape of scores, outcomes and weights on a rank, from its description in `announce`."""
        n, weighted = int(row[0]), int(row[3])
        dtypes = (_SCORE_DTYPES[int(row[1])], _OUTCOME_DTYPES[int(row[2])], _WEIGHT_DTYPES[max(0, weighted - 1)])
        lengths = (n, n, n if weighted else 0)
        return [(dtype, (*self.leading_shape, length)) for dtype, length in zip(dtypes, lengths, strict=True)]

    def _whole(self, state: Any) -> Sequence[Tensor]:
        """Return scores, outcomes and weights, each concatenated over all chunks."""
        chunks = _chunks_of(state)
        if not chunks:
            device = state.n_ignored.device
            return [torch.zeros(s, dtype=dtype, device=device) for dtype, s in self._columns((0, 0, 0, 0))]
        return _joined(chunks)


def _n_bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return dtype.itemsize * math.prod(shape)


def _chunks_of(state: Any) -> list[Sequence[Tensor]]:
    """Return a list of chunks, each with scores, outcomes and weights."""
    return list(zip(*state[:-1], strict=True))


def _joined(chunks: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
    """Concatenate chunks. If any chunk has weights, chunks without weights get weights of 1."""
    scores, outcomes, weights, *others = zip(*chunks, strict=True)
    device = scores[0].device
    if any(n.shape[-1] for n in weights):
        weights = tuple(
            n if n.shape[-1] else s.new_ones(s.shape, dtype=torch.int64) for s, n in zip(scores, weights, strict=True)
        )
    else:
        weights = weights[:1]
    columns = ([t.to(device) for t in part] for part in (scores, outcomes, weights, *others))
    return [torch.cat(column, -1) if len(column) > 1 else column[0] for column in columns]
