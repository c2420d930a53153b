"""Kinds of states: how statistics stream, merge, are saved, and are synced across ranks.

`SumsKind` is one tensor that adds. `SamplesKind` is lists of samples that concatenate; it has the same methods, and
`join`. A state is never written into: every operation returns a new one, which may share tensors with its operands.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchcalib.core.predictions import Predictions
from torchcalib.core.ranked import ExactSample, RankedSample
from torchcalib.core.sums import SumsAccumulator, settled, with_apart

S = TypeVar("S", covariant=True)

N_LEFT_OUT = 2
"""Counts that every state holds: bad rows, and missing ones (`nan_policy="drop"`)."""


def _are_counts(left_out: Tensor) -> bool:
    """Return whether saved numbers of rows are counts."""
    return bool(((left_out >= 0) & (left_out == left_out.round()) & left_out.isfinite()).all())


def left_out_of(p: Predictions, like: Tensor) -> Tensor:
    """Return the numbers of bad and of missing rows of a batch, which are left out: `(2,)` of the dtype of `like`."""
    if p.n_invalid is None and p.n_dropped is None:
        return like.new_zeros(N_LEFT_OUT)
    counts = [like.new_zeros(1) if n is None else n.to(like).reshape(1) for n in (p.n_invalid, p.n_dropped)]
    return torch.cat(counts)


@dataclass(frozen=True)
class SumsKind(Generic[S]):
    """One float64 tensor: the numbers of bad and of missing rows, `Sums.apart` of bins with noise, then the sums."""

    accumulator: SumsAccumulator[S]
    shape: tuple[int, ...]
    names: ClassVar[tuple[str, ...]] = ("sums",)

    def empty(self) -> Tensor:
        """Return the state before any data."""
        return torch.zeros(self._first + math.prod(self.shape), dtype=torch.float64)

    @property
    def _first(self) -> int:
        """Number of values before the sums."""
        return N_LEFT_OUT + (math.prod(self.shape[:-2]) if with_apart(self.accumulator) else 0)

    def parts(self, state: Tensor) -> list[Tensor | list[Tensor]]:
        """Return the parts of a state, each a tensor that adds or a list of tensors."""
        return [state]

    def of(self, p: Predictions) -> Tensor:
        """Return the state of one batch."""
        found = self.accumulator.of(p)
        sums, apart = found.sums.reshape(-1), () if found.apart is None else (found.apart.reshape(-1),)
        return torch.cat((left_out_of(p, sums), *apart, sums))

    def add(self, state: Tensor, more: Tensor) -> Tensor:
        """Return the state of both together."""
        return state + more.to(state)

    def detach(self, state: Tensor) -> Tensor:
        """Return the state without its graph."""
        return state.detach()

    def left_out(self, state: Tensor) -> Tensor:
        """Return how many rows were left out, bad ones and missing ones, float64 `(2,)`."""
        return state[:N_LEFT_OUT]

    def statistic(self, state: Tensor) -> S:
        """Return the statistic."""
        sums = state[self._first :].reshape(self.shape)
        if with_apart(self.accumulator):
            sums = settled(sums, state[N_LEFT_OUT : self._first].reshape(self.shape[:-2]))
        return self.accumulator.wrap(sums)

    def check(self, parts: Sequence[Any], like: Tensor) -> Tensor | None:
        """Return a copy of saved parts on the device of `like`, or None if they are no state of this kind.

        Sums in a narrower dtype have been rounded, and are refused.
        """
        (state,) = parts
        if not isinstance(state, Tensor) or state.shape != like.shape or state.dtype != torch.float64:
            return None
        if not _are_counts(state[:N_LEFT_OUT]):
            return None
        return state.detach().to(like, copy=True)

    def announce(self, state: Tensor, rank: int, world: int) -> Tensor:  # noqa: ARG002
        """Return what is summed over ranks, float64 `(n,)`."""
        return state.detach()

    def announced_by_all(self, announced: Sequence[Tensor]) -> Tensor:
        """Return the sum over ranks that `meet` expects, from what each rank announced as rank 0 of 1."""
        return torch.stack(list(announced)).sum(0)

    def payload(self, state: Tensor) -> Tensor:
        """Return what is gathered from every rank, uint8 `(n,)`: nothing."""
        return torch.zeros(0, dtype=torch.uint8, device=state.device)

    def payload_sizes(self, announced: Tensor, world: int) -> list[int]:  # noqa: ARG002
        """Return the size of the payload of every rank, from the sum of what they announced."""
        return [0] * world

    def meet(self, announced: Tensor, payloads: Sequence[Tensor]) -> Tensor:  # noqa: ARG002
        """Return the state of all ranks together."""
        return announced


class Samples(NamedTuple):
    """A state of samples: lists of tensors `(..., n)`, one of each for every chunk, and numbers of rows left out.

    Attributes:
        scores: see `RankedSample`; 4 bytes a sample for float32 input, 8 for multi-class logits.
        outcomes: uint8 labels or floating shares of votes.
        weights: int64 counts of copies; of size 0 where every sample counts once.
        left_out: bad ones and missing ones, float64 `(2,)`.
    """

    scores: list[Tensor]
    outcomes: list[Tensor]
    weights: list[Tensor]
    left_out: Tensor


_SCORE_DTYPES = (torch.float32, torch.float64)
_OUTCOME_DTYPES = (torch.uint8, torch.float32, torch.float64)


@dataclass(frozen=True)
class SamplesKind:
    """All samples: 5 bytes each for float32 (9 for float64 and multi-class logits), and 8 more with weights.

    A new chunk is joined with chunks at most twice its size. So there are few chunks, and a sample is copied about
    log2(N) times in all.
    """

    accumulator: ExactSample
    lead: tuple[int, ...]
    from_logits: bool
    names: ClassVar[tuple[str, ...]] = Samples._fields
    _more_dtypes: ClassVar[tuple[tuple[torch.dtype, ...], ...]] = ()
    """Dtypes of further columns, behind scores, outcomes and weights."""

    def empty(self) -> Any:
        """Return no chunks."""
        return self._made([], torch.zeros(N_LEFT_OUT, dtype=torch.float64))

    def join(self, parts: Sequence[Any]) -> Any:
        """Return the parts by their names."""
        return Samples(*parts)

    def parts(self, state: Any) -> Any:
        """Return the parts: the state is a tuple of them."""
        return state

    def of(self, p: Predictions) -> Any:
        """Return a batch as one chunk with memory of its own. On the CPU it has no rows that are left out."""
        score, *others = self._chunk(p)
        if p.weights is not None and score.device.type == "cpu" and score.dim() == 1:
            keep = ~score.detach().isnan()
            chunk = [score[keep], *(c[keep] if c.numel() else c for c in others)]
        else:
            chunk = [score.clone(), others[0].clone(), *others[1:]]
        return self._made([chunk], left_out_of(p, score.new_zeros(0, dtype=torch.float64)))

    def _chunk(self, p: Predictions) -> list[Tensor]:
        """Return the columns of a batch; all but scores and outcomes have memory of their own."""
        sample = self.accumulator.of(p)
        score = sample.score
        n = score.new_zeros((*score.shape[:-1], 0), dtype=torch.int64) if sample.n is None else sample.n.long()
        outcome = sample.positives
        if sample.n is not None:  # a share again, which is what adds to weights given later
            outcome = (outcome / sample.n.clamp(min=1)).to(torch.uint8 if p.hard else score.dtype)
        return [score, outcome, n]

    def _made(self, chunks: Sequence[Sequence[Tensor]], left_out: Tensor) -> Any:
        """Return the state of these chunks."""
        columns = zip(*chunks, strict=True) if chunks else [()] * (len(self.names) - 1)
        return self.join([*map(list, columns), left_out])

    def add(self, state: Any, more: Any) -> Any:
        """Append, and join chunks of like sizes."""
        chunks = _chunks_of(state)
        for chunk in _chunks_of(more):
            chunks.append(chunk)
            while (
                len(chunks) > 1
                and chunks[-1][0].device == chunks[-2][0].device
                and chunks[-2][0].shape[-1] <= 2 * chunks[-1][0].shape[-1]
            ):
                chunks[-2:] = [_joined(chunks[-2:])]
        return self._made(chunks, state.left_out + more.left_out.to(state.left_out))

    def detach(self, state: Any) -> Any:
        """Return the chunks without their graph."""
        columns = [[t.detach() if t.requires_grad else t for t in column] for column in state[:-1]]
        return self.join([*columns, state.left_out.detach()])

    def left_out(self, state: Any) -> Tensor:
        """Return the last part."""
        left_out: Tensor = state.left_out
        return left_out

    def statistic(self, state: Any) -> Any:
        """Return all samples."""
        return self._sample(*self._whole(state)[:3])

    def _sample(self, score: Tensor, outcome: Tensor, n: Tensor) -> RankedSample:
        if not n.shape[-1]:
            return RankedSample(score, outcome, None, self.from_logits)
        wide = n.to(torch.float64)
        return RankedSample(score, wide * outcome, wide, self.from_logits)

    def check(self, parts: Sequence[Any], like: Any) -> Any:
        """Return copies of saved chunks, or None if they have other batch axes or dtypes."""
        *lists, left_out = parts
        if not all(isinstance(part, list | tuple) for part in lists) or len({len(part) for part in lists}) != 1:
            return None
        if not isinstance(left_out, Tensor) or (left_out.shape, left_out.dtype) != ((N_LEFT_OUT,), torch.float64):
            return None
        if not _are_counts(left_out):
            return None
        for part, dtypes in zip(
            lists, (_SCORE_DTYPES, _OUTCOME_DTYPES, (torch.int64,), *self._more_dtypes), strict=True
        ):
            if not all(isinstance(chunk, Tensor) and chunk.dtype in dtypes for chunk in part):
                return None
        device = like.left_out.device
        for score, outcome, n, *_ in zip(*lists, strict=True):
            fits = score.shape == outcome.shape and score.shape[:-1] == self.lead == n.shape[:-1]
            if not fits or n.shape[-1] not in (0, score.shape[-1]):
                return None
        columns = [[t.detach().to(device, copy=True) for t in part] for part in lists]
        return self.join([*columns, left_out.detach().to(device, copy=True)])

    def announce(self, state: Any, rank: int, world: int) -> Tensor:
        """Return counts of rows left out and a table with a row for each rank: size, dtypes, whether weighted."""
        score, outcome, n, *_ = self._whole(state)
        table = torch.zeros(world, 4, dtype=torch.float64)
        table[rank, 0], table[rank, 1] = score.shape[-1], _SCORE_DTYPES.index(score.dtype)
        table[rank, 2], table[rank, 3] = _OUTCOME_DTYPES.index(outcome.dtype), float(n.shape[-1] > 0)
        return torch.cat((state.left_out.detach(), table.flatten().to(state.left_out.device)))

    def announced_by_all(self, announced: Sequence[Tensor]) -> Tensor:
        """Return the summed counts and the tables of all ranks."""
        counts = torch.stack([theirs[:N_LEFT_OUT] for theirs in announced]).sum(0)
        return torch.cat((counts, *(theirs[N_LEFT_OUT:] for theirs in announced)))

    def payload(self, state: Any) -> Tensor:
        """Return the bytes of all samples."""
        columns = [t.detach().contiguous().flatten().view(torch.uint8) for t in self._whole(state)]
        return torch.cat([column.to(state.left_out.device) for column in columns])

    def payload_sizes(self, announced: Tensor, world: int) -> list[int]:
        """Return the number of bytes of the samples of every rank."""
        table = announced[N_LEFT_OUT:].reshape(world, 4).tolist()
        return [sum(_n_bytes(dtype, shape) for dtype, shape in self._columns(row)) for row in table]

    def meet(self, announced: Tensor, payloads: Sequence[Tensor]) -> Any:
        """Return the samples of all ranks, a chunk for each that has any."""
        chunks: list[list[Tensor]] = []
        table = announced[N_LEFT_OUT:].reshape(len(payloads), 4).tolist()
        for row, payload in zip(table, payloads, strict=True):
            if row[0] == 0:
                continue
            start, chunk = 0, []
            for dtype, shape in self._columns(row):
                end = start + _n_bytes(dtype, shape)
                # A copy, for a view of another dtype must begin at a multiple of its size.
                chunk.append(payload[start:end].clone().view(dtype).reshape(shape))
                start = end
            chunks.append(chunk)
        return self._made(chunks, announced[:N_LEFT_OUT])

    def _columns(self, row: Sequence[float]) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of each column of a rank that announced `row`."""
        n, weighted = int(row[0]), bool(row[3])
        dtypes = (_SCORE_DTYPES[int(row[1])], _OUTCOME_DTYPES[int(row[2])], torch.int64)
        lengths = (n, n, n if weighted else 0)
        return [(dtype, (*self.lead, length)) for dtype, length in zip(dtypes, lengths, strict=True)]

    def _whole(self, state: Any) -> Sequence[Tensor]:
        """Return all chunks as one."""
        chunks = _chunks_of(state)
        if not chunks:
            device = state.left_out.device
            return [torch.zeros(s, dtype=dtype, device=device) for dtype, s in self._columns((0, 0, 0, 0))]
        return _joined(chunks) if len(chunks) > 1 else chunks[0]


def _n_bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return dtype.itemsize * math.prod(shape)


def _chunks_of(state: Any) -> list[Sequence[Tensor]]:
    """Return the columns of every chunk."""
    return list(zip(*state[:-1], strict=True))


def _joined(chunks: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
    """Join chunks into one; weights are written out if any chunk has some."""
    scores, outcomes, weights, *others = zip(*chunks, strict=True)
    device = scores[0].device
    if any(n.shape[-1] for n in weights):
        weights = tuple(
            n if n.shape[-1] else s.new_ones(s.shape, dtype=torch.int64) for s, n in zip(scores, weights, strict=True)
        )
    return [torch.cat([t.to(device) for t in part], -1) for part in (scores, outcomes, weights, *others)]
