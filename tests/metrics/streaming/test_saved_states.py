"""States in checkpoints: streaming continues after loading, and incompatible states raise an error."""

import json
from functools import partial

import pytest
import torch
from helpers.refusals import check_each
from torch import nn

import torchcalib as tc
import torchcalib.functional as F
from torchcalib.core.saved import FORM, saved_bytes
from torchcalib.core.state import SumState

P, Y = torch.tensor([0.2, 0.7, 0.9, 0.4]), torch.tensor([0, 1, 1, 1])
BINARY = {"task": "binary"}


def updated(metric, rows=slice(None)):
    metric.update(P[rows], Y[rows])
    return metric


def description(saved):
    return json.loads(bytes(saved["description"].tolist()))


def snapshot(*metrics):
    """Return a text of everything that a failed call must not change."""
    return str([(m.kind.parts(m.state), m.update_count, m._computed) for m in metrics])


def test_state_contains_a_description_and_can_be_stored_by_safetensors(tmp_path):
    options = {**BINARY, "n_bins": 7, "right": True, "ignore_index": -1}
    metric, loaded = updated(tc.ECE(**options, persistent=True)), tc.ECE(**options)
    described = description(metric.state_dict())
    assert (described["form"], described["torchcalib"], described["n_updates"]) == (FORM, tc.__version__, 1)
    assert described["configuration"].items() >= {"class": "ECE", "task": "binary", "n_bins": 7, "right": True}.items()
    assert loaded.state_dict() == {}
    files = pytest.importorskip("safetensors.torch")
    files.save_file(metric.state_dict(), tmp_path / "state.safetensors")
    loaded.load_state_dict(files.load_file(tmp_path / "state.safetensors"))
    assert loaded.compute() == metric.compute()


class Module(nn.Module):
    def __init__(self, **kwargs):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.metrics = nn.ModuleDict(
            {
                "one": tc.ECE(task="binary", **kwargs),
                "all": tc.CalibrationCollection([tc.NLL(task="binary"), tc.KS(task="binary")], prefix="v/", **kwargs),
            }
        )


def test_strict_loading_requires_the_state_of_persistent_metrics():
    plain, persistent = Module(), Module(persistent=True)
    assert plain.state_dict().keys() == {"layer.weight", "layer.bias"}
    with pytest.raises(RuntimeError, match=r'Missing key.*"metrics.one.sums", "metrics.one.description"'):
        persistent.load_state_dict(plain.state_dict())
    updated(persistent.metrics["one"])
    missing, unexpected = persistent.load_state_dict(plain.state_dict(), strict=False)
    assert len(missing) == 2 + 2 + 5
    assert not unexpected
    assert persistent.metrics["one"].update_count == 1
    plain.load_state_dict(persistent.state_dict())  # a metric with persistent=False loads a state, but saves none
    assert plain.metrics["one"].compute() == persistent.metrics["one"].compute()
    saved = {**persistent.state_dict(), "metrics.one.other": torch.zeros(1)}
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"metrics.one.other"'):
        plain.load_state_dict(saved)


REFUSED = [
    (tc.ECE, {"n_bins": 10}, "n_bins=15 instead of n_bins=10"),
    (tc.ECE, {"task": "multiclass"}, "task='binary' instead of task='multiclass'"),
    (tc.ECE, {"from_logits": True}, "from_logits=False instead of from_logits=True"),
    (tc.ECE, {"ignore_index": -1}, "ignore_index=None instead of ignore_index=-1"),
    (tc.ECE, {"batch_shape": (2,)}, r"batch_shape=\[\] instead of batch_shape=\[2\]"),
    (tc.ECE, {"with_ecd": True}, "with_ecd=False instead of with_ecd=True"),
    (tc.ECE, {"mode": "top_label"}, "mode='positive' instead of mode='top_label'"),
    (tc.ECE, {"task": "multiclass", "mode": tc.TopK(2, only=True)}, r"instead of mode='TopK\(k=2, only=True\)'"),
    (tc.MCE, {}, "class='ECE' instead of class='MCE'"),
    (tc.KS, {}, "class='ECE' instead of class='KS'.*n_bins=15 instead of n_bins=None"),
    (tc.KS, {"resolution": 64}, "resolution=None instead of resolution=64"),
    (lambda task: tc.ByGroup(tc.ECE(task=task), num_groups=2), {}, "num_groups=None instead of num_groups=2"),
    (
        lambda task: tc.Bootstrapped(tc.ECE(task=task), n_replicates=39),
        {},
        "n_replicates=None instead of n_replicates=39",
    ),
]


def test_states_of_metrics_with_other_options_raise_an_error_and_change_nothing():
    saved = updated(tc.ECE(**BINARY, persistent=True))
    state = saved.state_dict()

    def is_refused(row):
        make, options, message = row
        metric = make(**BINARY | options)
        before, module = snapshot(metric), nn.ModuleDict({"m": metric})
        for refusing, given in (
            (metric.load_state_dict, state),
            (metric.merge_state, state),
            (metric.merge_state, saved),
            (module.load_state_dict, {f"m.{name}": part for name, part in state.items()}),
        ):
            with pytest.raises(ValueError, match=message):
                refusing(given)
            assert snapshot(metric) == before

    check_each(REFUSED, is_refused)


def damaged(state):
    """Yield parts of error messages, and the changed entries of a state; None removes an entry."""
    text = bytes(state["description"].tolist())
    contents = [text[:-9], b"", b"[" * 100_000, b"\xff\xfe", b"{}"]
    contents += [torch.zeros(2**20 + 1, dtype=torch.uint8), torch.zeros(2, 2), -torch.ones(5), "text"]
    wrong = [{"form": "1"}, {"form": 0}, {"configuration": []}, {"n_updates": -1}, {"draws": "0"}]
    contents += [{**description(state), **changed} for changed in wrong]
    for content in contents:
        yield "a damaged one", {"description": content}
    for form, advice in ((FORM + 1, "Update torchcalib"), (FORM - 1, "Create it again")):
        other = {**description(state), "form": form, "torchcalib": "9.1"}
        message = f"must have version {FORM} of the saved form, got {form}, written by torchcalib '9.1'. {advice}"
        yield message, {"description": other}
    yield "must contain 'description'", {"description": None}
    yield r"must contain {'sums': '\(108,\) float64'}, got {'sums': '\(107,\) float64'}", {"sums": state["sums"][1:]}
    yield "got {'sums': '.* bfloat16'}. It is damaged, or its dtype was changed", {"sums": state["sums"].bfloat16()}
    yield "got {}", {"sums": None}
    yield "got {'sums': 3}", {"sums": 3}


def test_damaged_newer_older_and_undescribed_states_raise_errors():
    metric = updated(tc.ECE(task="binary", persistent=True))
    metric.compute()
    state, before = metric.state_dict(), snapshot(metric)

    def encoded(part):
        part = json.dumps(part).encode() if isinstance(part, dict) else part
        return torch.tensor(list(part), dtype=torch.uint8) if isinstance(part, bytes) else part

    def refuses(row):
        message, changed = row
        given = {n: encoded(part) for n, part in {**state, **changed}.items() if part is not None}
        for refusing in (metric.load_state_dict, partial(metric.load_state_dict, strict=False), metric.merge_state):
            with pytest.raises(ValueError, match=message):
                refusing(given)
            assert snapshot(metric) == before
        with pytest.raises(ValueError, match=message):
            metric.from_bytes(saved_bytes("metric state", given))

    check_each(damaged(state), refuses)
    metric.load_state_dict({**state, "description": state["description"].bfloat16()})  # a tool may cast all tensors


@pytest.mark.parametrize("prefix", ["", "m."])
def test_collection_loads_all_states_or_none(prefix):
    def made(n_bins, target):
        members = {"a": tc.NLL(**BINARY), "b": tc.ECE(**BINARY, n_bins=n_bins), "c": tc.KS(**BINARY)}
        metrics = tc.CalibrationCollection(members, persistent=True)
        metrics.update(P, target)
        return metrics

    def refuses(metrics, state, error, message):
        before, module = snapshot(*metrics.values()), nn.ModuleDict({"m": metrics}) if prefix else metrics
        with pytest.raises(error, match=message):
            module.load_state_dict({prefix + name: part for name, part in state.items()})
        assert snapshot(*metrics.values()) == before

    saved, other, like = made(15, Y), made(10, 1 - Y), made(15, 1 - Y)
    state = saved.state_dict()
    refuses(other, state, ValueError, rf"n_bins=15 instead of n_bins=10 at '{prefix}b\.'")
    if not prefix:
        del state["c.scores"]
        refuses(like, state, ValueError, r"must contain {'c.scores': .*got {'c.outcomes'")
        partly = {name: part for name, part in state.items() if not name.startswith("c.")}
        refuses(like, partly, RuntimeError, r'Missing key.*"c.scores"')
        like.load_state_dict(partly, strict=False)
        assert like["a"].compute() == saved["a"].compute()


def test_members_added_later_are_persistent():
    metrics = tc.CalibrationCollection([tc.NLL(task="binary")], persistent=True)
    metrics.add_metrics(tc.ECE(task="binary"))
    assert set(metrics.state_dict()) == {f"{m}.{part}" for m in ("NLL", "ECE") for part in ("sums", "description")}
    mixed = tc.CalibrationCollection([tc.NLL(task="binary", persistent=True), tc.ECE(task="binary")])
    assert set(mixed.state_dict()) == {"NLL.sums", "NLL.description"}
    with pytest.raises(TypeError, match="`persistent` must be True or False"):
        tc.NLL(task="binary", persistent=1)


def test_states_merge_across_nan_policies():
    """The sums have the same meaning, so that a run may continue from its checkpoint with "drop"."""
    metric = updated(tc.ECE(task="binary", persistent=True), slice(2))
    dropping = tc.ECE(task="binary", nan_policy="drop")
    dropping.load_state_dict(metric.state_dict())
    dropping.update(torch.cat((P[2:], torch.tensor([torch.nan]))), torch.cat((Y[2:], Y[:1])))
    torch.testing.assert_close(dropping.compute(), F.ece(P, Y, task="binary").double())
    metric.merge_state(dropping)
    metric.merge_state(dropping.metric_state)
    assert metric.n_dropped() == 2
    assert isinstance(metric.kind, SumState)
    assert metric.statistic().total == 10
