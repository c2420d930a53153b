"""Laws of states: the whole is the sum of its parts, copies are equal, and what fails changes nothing. Copied results.

They run once per row of states.py. A new kind of state is tested once it has a row there.
"""

import copy
import pickle
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
import torch
from contract.states import STATES, n_rows, rows_of, states
from helpers import fits
from helpers.ranks import connected, on_ranks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torchmetrics import Metric, MetricCollection

import torchcalib as tc

PACKAGE = str(Path(tc.__file__).parent)
REFUSALS = (ValueError, TypeError, RuntimeError)  # those of torchmetrics' names are RuntimeErrors
# torchmetrics warns about `compute` before `update`, which is a legal call.
pytestmark = pytest.mark.filterwarnings("ignore:The ``compute`` method of metric .* was called before")


@pytest.fixture(autouse=True)
def _patched(request, monkeypatch):
    given = getattr(request.node, "callspec", None)  # of a law
    for name, value in given.params["state"].patches.items() if given else ():
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


def examples(state):
    return settings(max_examples=state.examples, suppress_health_check=list(HealthCheck))


ASKED = Counter()


def law(where=lambda state: True, **which):
    return pytest.mark.parametrize("state", states(where, asked=ASKED, **which))


def divided(random, state):
    """Return batches of rows, some of which are empty, and the part that each belongs to."""
    n = state.n // state.block
    order = torch.arange(n)
    if state.order == "any":
        order = torch.tensor(random.sample(range(n), n))
    cuts = sorted(random.choices(range(n + 1), k=random.randint(2, 5)))
    blocks = [order[a:b] for a, b in pairwise((0, *cuts, n))]
    batches = [(rows[:, None] * state.block + torch.arange(state.block)).flatten() for rows in blocks]
    parts = random.choices(range(4 if state.merges else 1), k=len(batches))
    return batches, sorted(parts) if state.order == "rows" else parts


@law(lambda state: state.order, each_class=True)
def test_law_the_whole_is_the_sum_of_its_parts(state):
    """Rows in any order, batches of any size, and any tree of parts; in order, if the value depends on the order."""
    expected = state.value(state.after(slice(None)))

    @examples(state)
    @given(st.integers(0, 999))
    def check(seed):
        random = Random(seed)
        batches, part_of = divided(random, state)
        parts = [state.after(*(b for b, own in zip(batches, part_of, strict=True) if own == k)) for k in range(4)]
        while len(parts) > 1 and state.merges:
            k = random.randrange(len(parts) - 1)
            other = k + 1 if state.order == "rows" else random.randrange(k + 1, len(parts))
            before = state.content(parts[other])
            random.choice(list(state.merges.values()))(parts[k], parts[other])
            assert state.content(parts[other]) == before
            del parts[other]
        same(state.value(parts[0]), expected, state.rtol)

    check()


@law(each_class=True)
def test_law_copies_are_equal_and_share_nothing(state):
    """A copy is equal, and continues as the original. Neither changes the other."""
    n = state.n // 2 // state.block * state.block
    original, rest, longer = state.after(slice(0, n)), slice(n, None), {}
    before = state.content(original)
    for name, copied in state.copies.items():
        again = copied(state.make, original)
        assert state.content(again) == before, name
        longer[name] = copy.deepcopy(state.value(state.after(rest, state=again)))
        if isinstance(again, torch.nn.Module):
            for tensor in tensors_in(again.state_dict()):
                tensor.zero_()
        assert state.content(original) == before, name
    expected = state.value(state.after(rest, state=original))
    for name, value in longer.items():
        same(value, expected, 0, name)


def tensors_in(found):
    """Yield the tensors of nested dicts and lists."""
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, dict | list | tuple):
        for each in found.values() if isinstance(found, dict) else found:
            yield from tensors_in(each)


@law(lambda state: state.order)
def test_law_a_change_of_the_input_after_an_update_has_no_effect(state):
    columns = copy.deepcopy(state.columns) if "hidden" not in state.name else state.columns
    changed = state.after(columns)
    before = state.content(changed)
    for tensor in tensors_in(columns if "hidden" not in state.name else {}):
        tensor.zero_()
    assert state.content(changed) == before


CALLS = ("update", "update", "update in inference mode", "forward", "copy", "merge", "value", "reset", "refused")


@law(lambda state: state.order)
def test_law_calls_in_any_order_count_every_batch_once(state):
    """Batches have random rows and dtypes. The expected state has one update with each batch."""

    @examples(state)
    @given(st.integers(0, 999))
    def check(seed):
        random, counted, seen, rtol = Random(seed), state.make(), [], state.rtol
        for name in random.choices(CALLS, k=8):
            start, n = random.randint(0, 3), random.choice([0, 1, 2, 5])
            batch = rows_of(state.columns, slice(start * state.block, (start + n) * state.block))
            if isinstance(counted, Metric) and random.random() < 0.5:
                batch, rtol = {**batch, "preds": batch["preds"].float()}, max(rtol, 2e-6)
            if name == "copy":
                counted = random.choice(list(state.copies.values()))(state.make, counted)
            elif name == "value" and seen:
                same(state.value(counted), state.value(state.after(*seen)), rtol)
            elif name == "reset" and hasattr(counted, "reset"):
                counted.reset()
                seen = []
            elif name == "refused" and state.wrong:
                before = state.content(counted)
                with pytest.raises(REFUSALS):
                    state.add(counted, random.choice(list(spoiled(state))))
                assert state.content(counted) == before
            elif name == "merge" and state.merges:
                random.choice(list(state.merges.values()))(counted, state.after(batch))
                seen.append(batch)
            elif name == "forward" and isinstance(counted, Metric | MetricCollection):
                counted(**batch)
                seen.append(batch)
            elif name.startswith("update"):
                with torch.inference_mode(name != "update"):
                    state.add(counted, batch)
                seen.append(batch)
        if sum(n_rows(batch) for batch in seen):
            same(state.value(counted), state.value(state.after(*seen)), rtol)

    check()


def as_images(columns, length):
    """Return rows of 3 items, with their classes on axis 1. Clusters are those of items."""
    if isinstance(columns, dict):
        return {name: as_images(each, length) for name, each in columns.items()}
    items = columns.reshape(3, length, *columns.shape[1:])
    return items.movedim(-1, 1) if items.dim() > 2 else items


@law(lambda state: state.order and state.has_classes and state.n >= 33)
def test_law_a_stream_keeps_the_class_axis_of_its_first_batch(state):
    """Of 4 classes and 4 samples in an item, the axis is unknown. Copies and merged states know it."""
    first, ambiguous = (as_images(rows_of(state.columns, slice(*ends)), k) for ends, k in (((0, 21), 7), ((21, 33), 4)))
    flat = rows_of(state.columns, slice(21, 33))  # Rows of two axes are the same with both class axes.
    if "clusters" in first:
        first["clusters"], ambiguous["clusters"] = first["clusters"][:, 0], ambiguous["clusters"][:, 0]
        flat["clusters"] = ambiguous["clusters"].repeat_interleave(4)
    expected = state.value(state.after(first, flat))
    if "CalibrationError" not in state.name:  # torchmetrics has a fixed axis
        with pytest.raises(ValueError, match="`class_axis`"):
            state.after(ambiguous)
    ways = {"itself": lambda _, x: x, **state.copies}
    for name, merge in state.merges.items():
        ways[name] = lambda make, x, merge=merge: merged(make(), x, merge)
    for name, copied in ways.items():
        found = state.value(state.after(ambiguous, state=copied(state.make, state.after(first))))
        if not state.name.startswith("comparison") or "clusters" in state.columns:  # else items are resampled
            same(found, expected, state.rtol, name)


def merged(mine, theirs, merge):
    merge(mine, theirs)
    return mine


def spoiled(state):
    """Yield batches that must be refused: a wrong value in each row, and columns of other lengths."""
    batch = rows_of(state.columns, slice(0, 3 * state.block))
    if "weights" in batch:  # rows of weight 0 may be wrong
        batch["weights"] = torch.ones_like(batch["weights"])
    for name, value in state.wrong:
        for k in range(n_rows(batch)) if name in batch else ():
            yield {**batch, name: with_value(batch[name], k, value)}
    for name in list(batch)[1:]:
        yield {**batch, name: rows_of(batch[name], slice(0, -1))}


def with_value(column, k, value):
    if isinstance(column, dict):  # the last system has the wrong value
        last = list(column)[-1]
        return {**column, last: with_value(column[last], k, value)}
    column = column.clone()
    column[k] = value
    return column


@law(lambda state: state.wrong)
def test_law_refused_batches_change_nothing(state):
    """Also before the first batch, and in `forward`."""
    n = state.n // 2 // state.block * state.block
    expected = state.value(state.after(slice(0, n), slice(n, None)))
    empty, some = state.make(), state.after(slice(0, n))
    for each in (empty, some):
        before = state.content(each)
        for batch in spoiled(state):
            for add in (state.add, *[lambda x, columns: x(**columns)] * callable(getattr(each, "forward", None))):
                with pytest.raises(REFUSALS):
                    add(each, batch)
                assert state.content(each) == before
    same(state.value(state.after(slice(n, None), state=some)), expected, 0)
    same(state.value(state.after(slice(0, n), slice(n, None), state=empty)), expected, 0)


def calls_of(function, interrupted_at=None):
    """Return the number of calls within the package by a function. Interrupt it at one of them."""
    n = 0

    def count(frame, event, _):
        nonlocal n
        code = frame.f_code
        # An exception while an unfinished generator expression is closed is ignored.
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name != "<genexpr>":
            n += 1
            if n == interrupted_at:
                raise KeyboardInterrupt

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return n


@law(lambda state: state.order and not state.name.startswith("comparison"))  # which adds system by system
def test_law_interrupted_updates_change_nothing(state):
    """Interruptions at some calls within the package, and at all of the last ones, which store the new state."""
    n = state.n // 2 // state.block * state.block
    first, rest = slice(0, n), rows_of(state.columns, slice(n, None))
    expected = state.value(state.after(first, rest))
    counted, some = state.after(first), state.after(first)
    n_calls, before = calls_of(lambda: state.add(counted, rest)), state.content(some)
    for at in sorted({1 + k * (n_calls - 1) // 9 for k in range(10)} | {*range(max(1, n_calls - 15), n_calls + 1)}):
        with pytest.raises(KeyboardInterrupt):
            calls_of(lambda: state.add(some, rest), at)
        assert state.content(some) == before, f"after call {at} of {n_calls}"
    same(state.value(state.after(rest, state=some)), expected, 0)


@law(lambda state: state.merges)
def test_law_empty_states_and_batches_change_nothing(state):
    """Empty states are added to a state in every way, and it to them, one after the other."""
    whole = state.after(slice(None))
    expected = state.value(whole)
    for merge in state.merges.values():
        for make in (state.make, lambda: state.after(slice(0, 0))):
            merge(whole, make())
            whole = merged(make(), whole, merge)
    same(state.value(state.after(slice(0, 0), state=whole)), expected, 0)


@law(lambda state: state.order and not state.name.startswith(("report", "comparison")))  # which have no reset
def test_law_a_state_after_reset_is_an_empty_one(state):
    again = state.after(slice(0, 3 * state.block))
    state.value(again)
    again.reset()
    same(state.value(state.after(slice(None), state=again)), state.value(state.after(slice(None))), 0)


@law(lambda state: state.unlike)
def test_law_states_with_other_options_are_refused_and_change_nothing(state):
    mine, other = state.after(slice(0, 5 * state.block)), state.unlike()
    before = state.content(mine)
    merges = [*state.merges.values()]
    if hasattr(mine, "load_state_dict"):
        other.persistent(True)
        merges += [lambda mine, other: mine.load_state_dict(other.state_dict())]
        merges += [lambda mine, other: mine.from_bytes(other.state_bytes())]
    for merge in merges:
        with pytest.raises(REFUSALS):
            merge(mine, other)
        assert state.content(mine) == before


@law(lambda state: state.is_bounded)
def test_law_the_size_of_a_state_does_not_depend_on_the_number_of_batches(state):
    sizes = [len(pickle.dumps(state.content(state.after(*[slice(None)] * n)))) for n in (10, 30)]
    assert sizes[0] == sizes[1]


@law(lambda state: "metric" in state.merges and state.order == "any")
def test_law_ranks_have_the_value_of_all_rows(state):
    """Three ranks without `torch.distributed`. The first one has no rows."""
    shares = [slice(0, 0), slice(0, 13), slice(13, None)]

    def work(rank, gather):
        metric = state.make(**connected(gather))
        if rank:
            state.after(shares[rank], state=metric)
        before = state.content(metric)
        values = [state.value(metric) for _ in range(2)]
        assert state.content(metric) == before
        return values

    expected = state.value(state.after(slice(None)))
    for values in on_ranks(3, work):
        for value in values:
            same(value, expected, state.rtol)


def test_every_state_is_in_the_normal_run():
    """Each state is in the laws of the normal run that `pytest.mark.parametrize` has recorded."""
    laws = [value for name, value in globals().items() if name.startswith("test_law_")]
    params = [param for each in laws for mark in each.pytestmark for param in mark.args[1]]
    normal = {param.id for param in params if not param.marks}
    assert {state.name for state in STATES if not state.marks} == normal


def test_pickled_and_deeply_copied_results_are_equal():
    preds, target = fits.data(60)
    metric = tc.ECE(**fits.binary)
    metric.update(*fits.single(60))
    compared = tc.compare({"a": preds, "b": 2 * preds}, target, from_logits=True, n_replicates=39)
    for result in (tc.report(preds, target, **fits.multi), compared, metric.test(n_replicates=39), metric.bin_table()):
        content = result.to_dict() if hasattr(result, "to_json") else result
        for again in (pickle.loads(pickle.dumps(result)), copy.deepcopy(result)):
            assert repr(again.to_dict() if hasattr(result, "to_json") else again) == repr(content)
            assert str(again) == str(result)
