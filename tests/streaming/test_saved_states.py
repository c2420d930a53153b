"""States in checkpoints: they go on where they were, and one that counts another thing is refused by name."""

import copy
import json
import math
import pickle

import pytest
import torch
from cases import CASES
from helpers.each import check_each
from torch import nn

import torchcalib as tc
from torchcalib.states import SumsKind
from torchcalib.streaming.saving import STATE_FORMAT

P, Y = torch.tensor([0.2, 0.7, 0.9, 0.4]), torch.tensor([0, 1, 1, 1])
OF_CLASSES = list({case.cls: case for case in CASES if case.task == "multiclass"}.values())
KINDS = {
    **{case.name: case.metric for case in OF_CLASSES},
    "sketch": lambda **kwargs: tc.KS(task="multiclass", resolution=64, **kwargs),
    "bootstrapped": lambda **kwargs: tc.Bootstrapped(tc.NLL(task="multiclass"), n_replicates=39, **kwargs),
}


def data(n=60, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 4, generator=generator).softmax(-1), torch.randint(0, 4, (n,), generator=generator)


def of_format(metric, preds, target):
    """Logits for the metrics that read these."""
    return (preds.log() if metric.input_format.from_logits else preds), target


def description(saved, prefix=""):
    return json.loads(bytes(saved[prefix + "description"].tolist()))


def with_description(saved, prefix="", **changed):
    text = json.dumps({**description(saved, prefix), **changed})
    return {**saved, prefix + "description": torch.tensor(list(text.encode()), dtype=torch.uint8)}


def whole_state(metric):
    return copy.deepcopy(metric.kind.parts(metric.state)), metric.update_count, metric._computed


def same(one, other):
    return str(one) == str(other)


def test_law_a_stream_that_is_saved_and_loaded_is_the_stream(tmp_path):
    check_each(KINDS, lambda name: is_the_stream(name, tmp_path))


def is_the_stream(name, tmp_path):
    whole, first, second = (KINDS[name](persistent=True) for _ in range(3))
    preds, target = of_format(whole, *data())
    for metric in (whole, first):
        metric.update(preds[:25], target[:25])
    first.to(torch.bfloat16)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second.update(preds, target)  # what is loaded takes the place of what was there
    second.compute()
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert second.update_count == 1
    for metric in (whole, second):
        metric.update(preds[25:], target[25:])
    assert torch.equal(second.compute(), whole.compute())
    if name == "bootstrapped":
        assert torch.equal(second.interval().replicates, whole.interval().replicates)


def test_a_state_of_sums_is_tensors_that_safetensors_takes(tmp_path):
    files = pytest.importorskip("safetensors.torch")
    metric = tc.ECE(task="binary", persistent=True)
    metric.update(P, Y)
    files.save_file(metric.state_dict(), tmp_path / "state.safetensors")
    loaded = tc.ECE(task="binary")
    loaded.load_state_dict(files.load_file(tmp_path / "state.safetensors"))
    assert loaded.compute() == metric.compute()


def test_a_state_says_what_it_counts():
    metric = tc.ECE(task="binary", n_bins=7, right=True, ignore_index=-1, persistent=True)
    metric.update(P, Y)
    said = description(metric.state_dict())
    assert (said["format"], said["torchcalib"], said["n_updates"]) == (STATE_FORMAT, tc.__version__, 1)
    assert said["configuration"].items() >= {"class": "ECE", "task": "binary", "n_bins": 7, "right": True}.items()
    assert tc.ECE(task="binary").state_dict() == {}


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


def test_states_are_in_the_checkpoint_of_a_module_and_of_its_copies(tmp_path):
    module = Module(persistent=True)
    for metric in module.metrics.values():
        metric.update(P, Y)
    assert {name for name in module.state_dict() if name.startswith("metrics.all.NLL")} == {
        "metrics.all.NLL.sums",
        "metrics.all.NLL.description",
    }
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), module.to(torch.bfloat16)):
        other = Module(persistent=True)
        torch.save(copied.state_dict(), tmp_path / "module.pt")
        other.load_state_dict(torch.load(tmp_path / "module.pt", weights_only=True))
        for name, metric in module.metrics.items():
            assert other.metrics[name].compute() == metric.compute()
    cloned = module.metrics["all"].clone(prefix="w/")
    assert set(cloned.state_dict()) == set(module.metrics["all"].state_dict())


def test_strict_misses_the_state_of_a_persistent_metric_and_others_load_what_there_is():
    plain, persistent = Module(), Module(persistent=True)
    assert plain.state_dict().keys() == {"layer.weight", "layer.bias"}
    with pytest.raises(RuntimeError, match=r'Missing key.*"metrics.one.sums", "metrics.one.description"'):
        persistent.load_state_dict(plain.state_dict())
    persistent.metrics["one"].update(P, Y)
    missing, unexpected = persistent.load_state_dict(plain.state_dict(), strict=False)
    assert len(missing) == 2 + 2 + 5
    assert not unexpected
    assert persistent.metrics["one"].update_count == 1
    plain.load_state_dict(persistent.state_dict())  # takes what it is given, and saves none
    assert plain.metrics["one"].compute() == persistent.metrics["one"].compute()
    saved = {**persistent.state_dict(), "metrics.one.other": torch.zeros(1)}
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"metrics.one.other"'):
        plain.load_state_dict(saved)


REFUSED = [
    (lambda: tc.ECE(task="binary", n_bins=10), "n_bins=15 into n_bins=10"),
    (lambda: tc.ECE(task="binary", right=True), "right=False into right=True"),
    (lambda: tc.ECE(task="multiclass"), "task='binary' into task='multiclass'"),
    (lambda: tc.ECE(task="binary", from_logits=True), "from_logits=False into from_logits=True"),
    (lambda: tc.ECE(task="binary", ignore_index=-1), "ignore_index=None into ignore_index=-1"),
    (lambda: tc.ECE(task="binary", batch_shape=(2,)), r"batch_shape=\[\] into batch_shape=\[2\]"),
    (lambda: tc.ECE(task="binary", with_ecd=True), "with_ecd=False into with_ecd=True"),
    (lambda: tc.MCE(task="binary"), "class='ECE' into class='MCE'"),
    (lambda: tc.KS(task="binary"), "class='ECE' into class='KS'.*n_bins=15 into n_bins=None"),
    (
        lambda: tc.Bootstrapped(tc.ECE(task="binary"), n_replicates=39),
        "n_replicates=None into n_replicates=39",
    ),
]


def test_a_state_that_counts_another_thing_is_refused_by_name_and_nothing_changes():
    check_each(REFUSED, lambda pair: is_refused(*pair))


def is_refused(other, message):
    saved = tc.ECE(task="binary", persistent=True)
    saved.update(P, Y)
    state = saved.state_dict()
    metric = other()
    before = whole_state(metric)
    for refused in (
        lambda: metric.load_state_dict(state),
        lambda: metric.merge_state(state),
        lambda: metric.merge_state(saved),
        lambda: nn.ModuleDict({"m": metric}).load_state_dict({f"m.{name}": part for name, part in state.items()}),
    ):
        with pytest.raises(ValueError, match=message):
            refused()
        assert same(whole_state(metric), before)


def damaged(state):
    """Descriptions and states that are none, by what the error says."""
    text = bytes(state["description"].tolist())

    def as_tensor(content):
        return torch.tensor(list(content), dtype=torch.uint8)

    without = {name: part for name, part in state.items() if name != "description"}
    yield "must hold 'description'", without
    for broken in (
        as_tensor(text[:-9]),
        as_tensor(b""),
        as_tensor(b"[" * 100_000),
        as_tensor(b"\xff\xfe"),
        as_tensor(b"{}"),
        torch.zeros(2**20 + 1, dtype=torch.uint8),
        torch.zeros(2, 2),
        -torch.ones(5),
        "a string",
    ):
        yield "a damaged one", {**state, "description": broken}
    yield "a damaged one", with_description(state, format="1")
    yield "a damaged one", with_description(state, format=0)
    yield "a damaged one", with_description(state, configuration=[])
    yield "a damaged one", with_description(state, n_updates=-1)
    yield "a damaged one", with_description(state, draws="0")
    newer = with_description(state, format=STATE_FORMAT + 1, torchcalib="9.1", configuration={})
    yield f"of format {STATE_FORMAT + 1}, which torchcalib 9.1 has written. Update torchcalib", newer
    older = with_description(state, format=STATE_FORMAT - 1, torchcalib="0.1", configuration={})
    yield f"of format {STATE_FORMAT - 1}, which torchcalib 0.1 has written: states held less then", older
    yield (
        r"must hold {'sums': '\(78,\) float64'}, got {'sums': '\(77,\) float64'}",
        {
            **state,
            "sums": state["sums"][1:],
        },
    )
    yield "got {'sums': '.* bfloat16'}. It is damaged, or was cast", {**state, "sums": state["sums"].bfloat16()}
    for no_count in (math.nan, -1.0, 0.5):  # of the rows that were left out
        yield "It is damaged, or was cast", {**state, "sums": state["sums"].index_fill(0, torch.tensor(1), no_count)}
    yield "got {}", {"description": state["description"]}
    yield "got {'sums': 3}", {**state, "sums": 3}
    # as states were saved before they described themselves
    yield "must hold 'description'", {"sums_1a2b3": state["sums"]}


def test_a_state_that_is_damaged_or_newer_or_does_not_describe_itself_is_refused():
    metric = tc.ECE(task="binary", persistent=True)
    metric.update(P, Y)
    metric.compute()
    before = whole_state(metric)
    kinds = list(damaged(metric.state_dict()))
    for message, state in kinds:
        with pytest.raises(ValueError, match=message):
            metric.load_state_dict(state)
        with pytest.raises(ValueError, match=message):
            metric.load_state_dict(state, strict=False)
        with pytest.raises(ValueError, match=message):
            metric.merge_state(state)
        assert same(whole_state(metric), before)
    assert len(kinds) == 25


def test_damaged_samples_are_refused():
    metric = tc.KS(task="binary", persistent=True)
    metric.update(P, Y)
    state = metric.state_dict()
    for name, part in (
        ("scores", state["scores"][0]),
        ("scores", [state["scores"][0][1:]]),
        ("scores", []),
        ("outcomes", [state["outcomes"][0].long()]),
        ("weights", [torch.ones(3, dtype=torch.int64)]),
        ("left_out", torch.zeros(1, dtype=torch.float64)),
        ("left_out", torch.zeros(2)),
    ):
        with pytest.raises(ValueError, match=r"must hold {'scores': '1 chunks'.*It is damaged"):
            metric.load_state_dict({**state, name: part})
    torch.testing.assert_close(metric.compute(), tc.ks(P, Y, task="binary").double())


def test_a_description_survives_a_tool_that_casts_all_there_is():
    metric = tc.ECE(task="binary", persistent=True)
    metric.update(P, Y)
    state = metric.state_dict()
    metric.load_state_dict({**state, "description": state["description"].bfloat16()})


@pytest.mark.parametrize("nested", [False, True])
def test_a_collection_loads_all_states_or_none(nested):
    def made(n_bins):
        members = {"a": tc.NLL(task="binary"), "b": tc.ECE(task="binary", n_bins=n_bins), "c": tc.KS(task="binary")}
        return tc.CalibrationCollection(members, persistent=True)

    saved, other, like = made(15), made(10), made(15)
    saved.update(P, Y)
    for metrics in (other, like):
        metrics.update(P, 1 - Y)
    state = saved.state_dict()
    module = nn.ModuleDict({"m": other}) if nested else other
    prefix = "m." if nested else ""
    before = [whole_state(m) for m in other.values()]
    with pytest.raises(ValueError, match=rf"n_bins=15 into n_bins=10 at '{prefix}b\.'"):
        module.load_state_dict({prefix + name: part for name, part in state.items()})
    assert same([whole_state(m) for m in other.values()], before)
    if not nested:
        del state["c.scores"]
        before = [whole_state(m) for m in like.values()]
        with pytest.raises(ValueError, match=r"must hold {'c.scores': .*got {'c.outcomes'"):
            like.load_state_dict(state)
        partly = {name: part for name, part in state.items() if not name.startswith("c.")}
        with pytest.raises(RuntimeError, match=r'Missing key.*"c.scores"'):
            like.load_state_dict(partly)
        assert same([whole_state(m) for m in like.values()], before)
        like.load_state_dict(partly, strict=False)
        assert like["a"].compute() == saved["a"].compute()


def test_members_that_are_added_later_are_persistent_too():
    metrics = tc.CalibrationCollection([tc.NLL(task="binary")], persistent=True)
    metrics.add_metrics(tc.ECE(task="binary"))
    assert set(metrics.state_dict()) == {f"{m}.{part}" for m in ("NLL", "ECE") for part in ("sums", "description")}
    mixed = tc.CalibrationCollection([tc.NLL(task="binary", persistent=True), tc.ECE(task="binary")])
    assert set(mixed.state_dict()) == {"NLL.sums", "NLL.description"}
    for bad in (lambda: tc.NLL(task="binary", persistent=1), lambda: tc.CalibrationCollection([], persistent=None)):
        with pytest.raises(TypeError, match="`persistent` must be True or False"):
            bad()


def test_what_is_loaded_or_merged_shares_no_memory_with_the_dict():
    for cls in (tc.ECE, tc.KS):
        metric, other = cls(task="binary", persistent=True), cls(task="binary")
        metric.update(P, Y)
        state = metric.state_dict()
        other.load_state_dict(state)
        other.merge_state(state)
        for part in state.values():
            for tensor in part if isinstance(part, list) else [part]:
                tensor.zero_()
        torch.testing.assert_close(other.compute(), metric.compute())


def test_merging_takes_what_was_saved_and_the_state_of_another_nan_policy():
    """A run that ended with a NaN goes on from its checkpoint with "drop": the sums mean the same."""
    metric = tc.ECE(task="binary", persistent=True)
    metric.update(P[:2], Y[:2])
    dropping = tc.ECE(task="binary", nan_policy="drop")
    dropping.load_state_dict(metric.state_dict())
    dropping.update(torch.cat((P[2:], torch.tensor([torch.nan]))), torch.cat((Y[2:], Y[:1])))
    torch.testing.assert_close(dropping.compute(), tc.ece(P, Y, task="binary").double())
    metric.merge_state(dropping)
    metric.merge_state(dropping.metric_state)
    assert metric.n_dropped() == 2
    assert isinstance(metric.kind, SumsKind)
    assert metric.statistic().total == 10


def test_draws_of_one_seed_are_not_merged_from_a_dict_either():
    def drawn(seed, rows):
        metric = tc.Bootstrapped(tc.NLL(task="binary"), n_replicates=39, seed=seed, persistent=True)
        metric.update(P[rows], Y[rows])
        return metric

    one, other = drawn(0, slice(0, 2)), drawn(0, slice(2, 4))
    with pytest.raises(ValueError, match="must have drawn other numbers, got seed=0 in both"):
        one.merge_state(other.state_dict())
    one.merge_state(drawn(1, slice(2, 4)).state_dict())
    torch.testing.assert_close(one.compute(), tc.nll(P, Y, task="binary").double())
