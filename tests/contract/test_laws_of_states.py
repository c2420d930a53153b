"""Laws of states: the whole is the sum of its parts, copies are equal, and what fails changes nothing.

They run once per row of states.py. A new kind of state is tested once it has a row there.
"""

import sys
import warnings
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from contract.states import STATES, n_rows, rows_of, states
from helpers.ranks import connected, on_ranks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torchcalib as tc
from torchcalib.core.linear_logits import LinearLogits

PACKAGE = str(Path(tc.__file__).parent)
FEW = settings(max_examples=5, suppress_health_check=list(HealthCheck))
# torchmetrics warns about `compute` before `update`, which is a legal call.
pytestmark = pytest.mark.filterwarnings("ignore:The ``compute`` method of metric .* was called before")


@pytest.fixture(autouse=True)
def _patched(request, monkeypatch):
    for name, value in request.node.callspec.params["state"].patches.items():
        monkeypatch.setattr(name, value)


def same(found, expected, rtol=1e-12, where="value"):
    """Compare nested values: equal text and counts, other numbers with a tolerance."""
    if isinstance(expected, dict):
        assert list(found) == list(expected), where
        for name, value in expected.items():
            same(found[name], value, rtol, f"{where}/{name}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for k, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            same(mine, theirs, rtol, f"{where}/{k}")
    elif isinstance(expected, torch.Tensor | float):
        torch.testing.assert_close(
            found, expected, rtol=rtol, atol=rtol, equal_nan=True, check_dtype=True, msg=lambda m: f"{where}: {m}"
        )
    else:
        assert found == expected, where


def content(state):
    """Return everything that a failed call must not change."""
    return state.state_bytes() if hasattr(state, "state_bytes") else str(vars(state))


def law(where=lambda state: True):
    return pytest.mark.parametrize("state", states(where))


def divided(data, state):
    """Draw batches of rows, some of which are empty, and the part that each belongs to."""
    n = state.n // state.block
    order = torch.arange(n)
    if state.order == "any":
        order = order[torch.randperm(n, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))]
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=4)))
    blocks = [order[a:b] for a, b in pairwise((0, *cuts, n))]
    batches = [(rows[:, None] * state.block + torch.arange(state.block)).flatten() for rows in blocks]
    parts = [data.draw(st.integers(0, 3 if state.merges else 0)) for _ in batches]
    return batches, sorted(parts) if state.order == "rows" else parts


@law(lambda state: state.order)
def test_law_the_whole_is_the_sum_of_its_parts(state):
    """Rows in any order, batches of any size, and any tree of parts; in order, if the value depends on the order."""
    expected = state.value(state.after(slice(None)))

    @FEW
    @given(st.data())
    def check(data):
        batches, part_of = divided(data, state)
        parts = [state.after(*(b for b, own in zip(batches, part_of, strict=True) if own == k)) for k in range(4)]
        while len(parts) > 1 and state.merges:
            k = data.draw(st.integers(0, len(parts) - 2))
            other = k + 1 if state.order == "rows" else data.draw(st.integers(k + 1, len(parts) - 1))
            before = content(parts[other])
            state.merges[data.draw(st.sampled_from(list(state.merges)))](parts[k], parts[other])
            assert content(parts[other]) == before
            del parts[other]
        same(state.value(parts[0]), expected, state.rtol)

    check()


@law()
def test_law_copies_are_equal_and_share_nothing(state):
    """A copy has the same values, and continues as the original. Neither changes the other."""
    n = state.n // 2 // state.block * state.block
    first, rest = slice(0, n), slice(n, None)
    original, whole = state.after(first), state.after(first, rest)
    before, expected, longer = content(original), state.value(original), state.value(whole)
    for name, copied in state.copies.items():
        again = copied(state.make, original)
        same(state.value(again), expected, 0, name)
        state.after(rest, state=again)
        same(state.value(again), longer, 0, name)
        assert content(original) == before, name
        if hasattr(again, "reset"):
            again.reset()
        if isinstance(again, torch.nn.Module):
            for tensor in again.state_dict().values():
                for each in tensor if isinstance(tensor, list) else [tensor]:
                    each.zero_() if isinstance(each, torch.Tensor) else None
        assert content(original) == before, name
    state.after(rest, state=original)
    same(state.value(original), longer, 0)


def spoiled(state):
    """Yield batches that must be refused: a wrong value in each row, and columns of other lengths."""
    batch = rows_of(state.columns, slice(0, 5 * state.block))
    for name, value in state.wrong:
        for k in range(n_rows(batch)):
            yield {**batch, name: with_value(batch[name], k, value)}
    yield {**batch, "target": batch["target"][:-1]}
    for name in batch.keys() - {"preds", "target"}:
        yield {**batch, name: batch[name][:-1]}


def with_value(column, k, value):
    if isinstance(column, dict):  # the last system has the wrong value
        last = list(column)[-1]
        return {**column, last: with_value(column[last], k, value)}
    column = column.clone() if torch.is_tensor(value) or value == value or column.is_floating_point() else column
    column[k] = value
    return column


@law(lambda state: state.wrong)
def test_law_refused_batches_change_nothing(state):
    """Also before the first batch, and in `forward`."""
    n = state.n // 2 // state.block * state.block
    expected = state.value(state.after(slice(0, n), slice(n, None)))
    empty, some = state.make(), state.after(slice(0, n))
    for each in (empty, some):
        before = content(each)
        for batch in spoiled(state):
            for add in (state.add, *[lambda x, columns: x(**columns)] * callable(getattr(each, "forward", None))):
                with pytest.raises((ValueError, TypeError)):
                    add(each, batch)
                assert content(each) == before
    same(state.value(state.after(slice(n, None), state=some)), expected, 0)
    same(state.value(state.after(slice(0, n), slice(n, None), state=empty)), expected, 0)


def calls_of(function, interrupted_at=None):
    """Return the number of calls within the package by a function. Interrupt it at one of them."""
    n = 0

    def count(frame, event, _):
        nonlocal n
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            n += 1
            if n == interrupted_at:
                raise KeyboardInterrupt

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return n


@law()
def test_law_interrupted_updates_change_nothing(state):
    """Ten interruptions, from the first call within the package to the last one."""
    n = state.n // 2 // state.block * state.block
    expected = state.value(state.after(slice(0, n), slice(n, None)))
    some = state.after(slice(0, n))
    before = content(some)
    rest = rows_of(state.columns, slice(n, None))
    n_calls = calls_of(lambda: state.add(state.after(slice(0, n)), rest))
    for k in range(10):
        at = 1 + k * (n_calls - 1) // 9
        with pytest.raises(KeyboardInterrupt):
            calls_of(lambda: state.add(some, rest), at)
        assert content(some) == before, f"after call {at} of {n_calls}"
    state.add(some, rest)
    same(state.value(some), expected, 0)


@law(lambda state: state.merges)
def test_law_empty_states_and_batches_change_nothing(state):
    whole, expected = state.after(slice(None)), state.value(state.after(slice(None)))
    for merge in state.merges.values():
        for each in (state.after(slice(0, 0)), state.make()):
            merge(whole, each)
            same(state.value(whole), expected, 0)
            merge(each, whole)
            same(state.value(each), expected, 0)
    state.after(slice(0, 0), state=whole)
    same(state.value(whole), expected, 0)


@law(lambda state: hasattr(state.make(), "reset"))
def test_law_a_state_after_reset_is_an_empty_one(state):
    again = state.after(slice(0, 3 * state.block))
    state.value(again)
    again.reset()
    same(state.value(state.after(slice(None), state=again)), state.value(state.after(slice(None))), 0)


@law(lambda state: state.unlike)
def test_law_states_with_other_options_are_refused_and_change_nothing(state):
    mine, other = state.after(slice(0, 5 * state.block)), state.unlike()
    before = content(mine)
    merges = [*state.merges.values()]
    if hasattr(mine, "load_state_dict"):
        other.persistent(True)
        merges += [lambda mine, other: mine.load_state_dict(other.state_dict())]
        merges += [lambda mine, other: mine.from_bytes(other.state_bytes())]
    for merge in merges:
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            merge(mine, other)
        assert content(mine) == before


@law(lambda state: state.is_bounded)
def test_law_the_size_of_a_state_does_not_depend_on_the_number_of_batches(state):
    sizes = [len(content(state.after(*[slice(None)] * n))) for n in (10, 30)]
    assert sizes[0] == sizes[1]


@law(lambda state: "metric" in state.merges and state.order == "any")
def test_law_ranks_have_the_value_of_all_rows(state):
    """Three ranks without `torch.distributed`. The first one has no rows."""
    shares = [slice(0, 0), slice(0, 13), slice(13, None)]

    def work(rank, gather):
        metric = state.make(**connected(gather))
        if rank:
            state.after(shares[rank], state=metric)
        before = content(metric)
        values = [state.value(metric) for _ in range(2)]
        assert content(metric) == before
        return values

    expected = state.value(state.after(slice(None)))
    for values in on_ranks(3, work):
        for value in values:
            same(value, expected, state.rtol)
