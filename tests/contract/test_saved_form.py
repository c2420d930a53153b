"""Saved states: no damaged byte gives another number, and values that are not possible are refused.

States are those of states.py. The form of all of them is that of `torchcalib.core.saved`.
"""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cases import formulas
from contract.states import BINARY, FEW_REPLICATES, STATES, columns_of, dependent
from helpers.refusals import check_each
from safetensors.torch import load, save

import torchcalib as tc
from torchcalib.calibration import TemperatureScaling, load_calibrator, save_calibrator
from torchcalib.core import saved
from torchcalib.core.saved import FORM, content_of, saved_bytes
from torchcalib.io.errors import InputError
from torchcalib.reporting.comparison import system

SMALL = 20_000  # bytes of a state whose bits are all changed


@pytest.fixture(autouse=True)
def _patched(request, monkeypatch):
    given = getattr(request.node, "callspec", None)
    patches = given.params["state"].patches if given and "state" in given.params else FEW_REPLICATES
    for name, value in patches.items():
        monkeypatch.setattr(name, value)
    monkeypatch.setattr(system, "num_clusters_for", lambda _: 4)  # groups of a comparison


def kind_of(content):
    """Return the kind of a saved form. This is how another program reads the header."""
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return json.loads(header["__metadata__"]["torchcalib"][8:])["kind"]


def is_refused(content, kind):
    try:
        content_of(content, kind)
    except Exception:
        return True
    return False


def few_rows(state):
    return state.after(slice(0, 8 * state.block))


def smallest_of_each():
    """Return the smallest state of each kind that has bytes: metrics, wrappers, collections, reports, comparisons."""
    found = {}
    for state in STATES:
        if "bytes" in state.copies and not state.marks and not state.patches.keys() - FEW_REPLICATES.keys():
            found.setdefault(state.name.partition(" ")[0], state)
    return list(found.values())


@pytest.mark.parametrize("state", smallest_of_each(), ids=str)
def test_every_changed_bit_of_a_state_is_refused(state):
    content = bytearray(few_rows(state).state_bytes())
    kind = kind_of(content)
    assert not is_refused(content, kind)
    n_bits = 8 * len(content)
    accepted = []
    for k in range(n_bits) if len(content) < SMALL else random.Random(0).sample(range(n_bits), 2000):
        content[k >> 3] ^= 1 << (k & 7)
        if not is_refused(content, kind):
            accepted.append(k)
        content[k >> 3] ^= 1 << (k & 7)
    assert not accepted
    assert not is_refused(content, kind)


def test_every_changed_bit_of_a_calibrator_is_refused(tmp_path):
    save_calibrator(TemperatureScaling().fit([0.9, 0.99, 0.3, 0.8], [1, 1, 0, 0]), tmp_path / "cal")
    content = bytearray((tmp_path / "cal").read_bytes())
    for k in range(8 * len(content)):
        content[k >> 3] ^= 1 << (k & 7)
        assert is_refused(content, "calibrator"), k
        content[k >> 3] ^= 1 << (k & 7)
    assert not is_refused(content, "calibrator")


def mutated(content, rng):
    """Return changed bytes: some bits, random bytes, zeros, or a part that is removed, repeated or appended."""
    content, (start, end) = bytearray(content), sorted(rng.choices(range(len(content) + 1), k=2))
    way = rng.randrange(6)
    if way == 0:
        for _ in range(rng.randint(1, 9)):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    elif way == 1:
        content[start:end] = rng.randbytes(end - start)
    elif way == 2:
        del content[start:end]
    elif way == 3:
        content[start:start] = content[start:end]
    elif way == 4:
        content[start:end] = bytes(end - start)
    else:
        content += rng.randbytes(rng.randint(1, 99))
    return bytes(content)


@pytest.mark.parametrize("n", [300, pytest.param(100_000, marks=pytest.mark.long)])
def test_random_changes_of_bytes_never_give_another_number(n):
    rng = random.Random(n)
    originals = [few_rows(state).state_bytes() for state in smallest_of_each()]
    originals = [(content, kind_of(content)) for content in originals if len(content) < SMALL]
    for _ in range(n):
        content, kind = rng.choice(originals)
        changed = mutated(content, rng)
        assert changed == content or is_refused(changed, kind)


@pytest.mark.parametrize("n", [300, pytest.param(20_000, marks=pytest.mark.long)])
def test_random_values_with_a_valid_checksum_give_a_possible_value_or_an_error(n):
    """What a program with a fault, or an attacker, writes: the sums and samples are random, and the form is valid."""
    rng = random.Random(n)
    metrics = [cls(task="binary") for cls in (tc.ECE, tc.ACE, tc.BrierScore, tc.KS, tc.SmECE)]
    metrics.append(tc.ByGroup(tc.ECE(task="binary"), num_groups=2))
    for metric in metrics:
        given = {"groups": torch.arange(40) % 2} if isinstance(metric, tc.ByGroup) else {}
        preds, target = columns_of(BINARY)["preds"], columns_of(BINARY)["target"]
        metric.update(preds, target, **given)
    n_accepted = 0
    for _ in range(n):
        metric = rng.choice(metrics)
        content = content_of(metric.state_bytes(), "metric state")
        for name in rng.sample(list(metric.kind.names), 1):
            part = content[name][0] if isinstance(content[name], list) else content[name]
            bits = part.view(torch.uint8)
            for _ in range(rng.randint(1, 3) if bits.numel() else 0):
                bits[rng.randrange(len(bits))] ^= 1 << rng.randrange(8)
        try:
            value = metric.from_bytes(saved_bytes("metric state", content)).compute()
        except ValueError:
            continue
        n_accepted += 1
        assert ((value >= 0) & (value <= 2) | value.isnan()).all(), metric
    assert 0 < n_accepted < n


def test_other_and_older_and_newer_forms_raise_errors_that_say_so(tmp_path, monkeypatch):
    metric = tc.ECE(task="binary")
    content = metric.state_bytes()

    def resigned(old, new, end=b""):
        """Change text in the header, add bytes at the end, and correct the length of the header and the checksum."""
        changed = content.replace(old, new)
        length = int.from_bytes(changed[:8], "little") + len(changed) - len(content)
        changed, at = length.to_bytes(8, "little") + changed[8:] + end, saved._CHECKSUM
        return changed[: at.start] + saved._checksum(changed) + changed[at.stop :]

    tensors = load(content)
    torch.save(tensors, tmp_path / "old.pt")
    number = rb"\"form\": %d, \"torchcalib\": \"0.1.0\", \"byteorder"
    newer, older = (resigned(number % FORM, number % form) for form in (99, 3))
    for given, words in (
        (b"", "got other content"),
        (b"hello" * 99, "got other content"),
        (content[:200], "got damaged content"),
        (content + b"\0", "got damaged content"),
        (save(tensors), "got other content"),
        ((tmp_path / "old.pt").read_bytes(), "a zip archive, as versions before 0.1.0 wrote"),
        (tc.ReportBuilder(task="binary").state_bytes(), "got a 'report state'"),
        (content[:-8], "got damaged content"),
        (newer, "got 99, written by torchcalib '0.1.0'. Update torchcalib from version"),
        (older, "got 3, written by torchcalib '0.1.0'. Create it again from the data"),
        (resigned(b'little', b"big"), "must have the byte order of this machine"),
        (resigned(b"[0,864]", b"[0,856]"), "got SafetensorError"),
        (resigned(b"[108]", b"[107]"), "got SafetensorError"),
        (resigned(b"[108]", b"[9999999999999]"), "got SafetensorError"),
        (resigned(b"", b"", end=bytes(8)), "got SafetensorError"),
        (resigned(b'{\\"$tensor\\": \\"0/sums\\"}', b"3"), "must name each tensor once"),
        (saved_bytes("metric state", {"sums": [torch.ones(1), torch.ones(1)]}), "must contain 'description'"),
    ):  # fmt: skip
        with pytest.raises(InputError if "description" not in words else ValueError, match=words):
            metric.from_bytes(given)
    monkeypatch.setattr(saved, "_MAX_HEADER", 100)
    with pytest.raises(InputError, match="got other content"):
        metric.from_bytes(content)
    with pytest.raises(InputError, match="must be a complete metric state, got TypeError"):
        metric.from_bytes(3)


def test_bytes_of_any_kind_are_accepted_and_equal_states_have_equal_bytes():
    metric = tc.KS(task="binary")
    metric.update(torch.tensor([0.2, 0.7, 0.4]), torch.tensor([0, 1, 1]))
    content = metric.state_bytes()
    for kind in (bytes, bytearray, memoryview, lambda x: memoryview(x).cast("b")):
        assert metric.from_bytes(kind(content)).state_bytes() == content
    whole = torch.arange(12.0, dtype=torch.float64).reshape(3, 4)
    parts = {"a": whole[:, 1], "b": whole.T, "c": whole[0], "d": whole[:0], "e": [None, True, "x", {"f": 2.5}]}
    again = content_of(saved_bytes("x", parts), "x")
    for name in "abcd":
        assert torch.equal(again[name], parts[name])
    assert again["e"] == parts["e"]
    assert saved_bytes("x", again) == saved_bytes("x", parts)
    shared = tc.CalibrationCollection([tc.KS(task="binary"), tc.ACE(task="binary")])  # share their samples
    shared.update(torch.tensor([0.2, 0.7, 0.4]), torch.tensor([0, 1, 1]))
    assert shared.from_bytes(shared.state_bytes()).compute() == shared.compute()


# Values that a state cannot have


def scaled(factor):
    return lambda part: part * factor


def filled(value, *place):
    """Return a function that sets a number of a part; of all if no place is given."""

    def change(part):
        part = part.clone()
        part[place or ...] = value
        return part

    return change


def row(k, value, shape=(7, 15), offset=3):
    """Return a function that sets all sums of a quantity, which follow the counts of ignored rows and a flag."""

    def change(part):
        part = part.clone()
        part[offset:].view(*shape)[k] = value
        return part

    return change


ECE, ACE = (lambda: tc.ECE(task="binary")), (lambda: tc.ACE(task="binary"))
LOGITS = lambda: tc.KS(task="binary", from_logits=True)  # noqa: E731
GROUPS = lambda: tc.ByGroup(tc.KS(task="binary"), num_groups=3)  # noqa: E731
BOOTSTRAP = lambda: tc.Bootstrapped(tc.NLL(task="binary"), n_replicates=39)  # noqa: E731
SCORES = (tc.NLL, tc.BrierScore, tc.Accuracy, tc.StratifiedBrierScore, tc.BayesRisk)
IMPOSSIBLE: list[tuple[Callable, str, Callable]] = [
    *((ECE, "sums", change) for change in (scaled(-1), scaled(torch.nan), scaled(1e308), scaled(0.3))),
    (ECE, "sums", filled(-1.0, 0)),  # ignored rows
    (ECE, "sums", filled(0.5, 1)),
    (ECE, "sums", filled(-1.0, 2)),  # flag of the noise
    (ECE, "sums", filled(torch.inf, 2)),
    (ECE, "sums", row(0, -1.0)),
    (ECE, "sums", row(0, torch.inf)),
    (ECE, "sums", row(1, 99.0)),  # confidences
    (ECE, "sums", row(1, -0.1)),
    (ECE, "sums", row(2, 99.0)),  # positives
    (ECE, "sums", row(2, 0.5)),
    (ECE, "sums", row(3, 99.0)),  # p (1 - p)
    (ECE, "sums", row(4, -1.0)),
    (ECE, "sums", row(5, torch.nan)),
    (ECE, "sums", row(6, 99.0)),
    (ECE, "sums", lambda part: part[:-1]),
    (ECE, "sums", lambda part: part.float()),
    *((lambda cls=cls: cls(task="binary"), "sums", scaled(-1)) for cls in (*SCORES, tc.SmECE, tc.Spiegelhalter)),
    *((lambda cls=cls: cls(task="binary"), "sums", scaled(torch.nan)) for cls in (*SCORES, tc.SmECE, tc.SKCE)),
    *((lambda cls=cls: cls(task="binary"), "sums", filled(1e9, 3)) for cls in (tc.BrierScore, tc.Accuracy, tc.SKCE)),
    (lambda: tc.KS(task="binary", resolution=16), "sums", scaled(-1)),
    (lambda: tc.ByGroup(tc.ECE(task="binary"), num_groups=3), "sums", scaled(-1)),
    (lambda: tc.Clustered(tc.ECE(task="binary")), "sums", scaled(-1)),
    *((lambda: tc.Clustered(tc.ECE(task="binary")), "identifiers", change)
      for change in (lambda chunks: [x.double() for x in chunks], lambda chunks: [x[None] for x in chunks],
                     lambda chunks: chunks[0])),
    (BOOTSTRAP, "sums", scaled(-1)),
    (BOOTSTRAP, "sums", filled(-1.0, -1)),
    (BOOTSTRAP, "sums", filled(0.5, -2)),
    (BOOTSTRAP, "sums", filled(99.0, -1)),  # more rows of clusters than rows
    (BOOTSTRAP, "sums", filled(-5.0, 9)),
    *((ACE, "scores", filled(value, 0)) for value in (7.0, -0.1, torch.inf, -torch.inf)),
    (ACE, "scores", lambda x: x[1:]),
    (ACE, "scores", lambda x: x.half()),
    (ACE, "outcomes", filled(255, 0)),
    (ACE, "outcomes", lambda x: x.half()),
    (ACE, "outcomes", lambda x: x.double() + 0.5),
    (ACE, "outcomes", lambda x: x.double() * torch.nan),
    (ACE, "weights", filled(-5, 0)),
    (ACE, "weights", lambda x: x.double() * 0.5),
    (ACE, "weights", lambda x: x.double() * torch.inf),
    (ACE, "weights", lambda x: x * 2**53 * 2),
    (ACE, "weights", lambda x: x.half()),
    (ACE, "scores", lambda x: None),
    (ACE, "n_ignored", filled(-1.0, 0)),
    (ACE, "n_ignored", lambda x: x[:1]),
    (ACE, "n_ignored", lambda x: x.float()),
    (LOGITS, "outcomes", filled(2, 0)),
    (GROUPS, "keys", filled(3, 0)),
    (GROUPS, "keys", filled(-1, 0)),
    (GROUPS, "keys", lambda x: x[1:]),
    (GROUPS, "keys", lambda x: x.long()),
]  # fmt: skip


def of_some_rows(make):
    metric = make()
    columns = {**dependent(20), "groups": torch.arange(20) % 3}
    names = {tc.ByGroup: ("groups",), tc.Clustered: ("clusters",)}.get(type(metric), ())
    weights = {} if isinstance(metric, tc.SKCE) else {"weights": columns["weights"]}
    metric.update(columns["preds"], columns["target"], **weights, **{name: columns[name] for name in names})
    return metric


def test_values_that_a_state_cannot_have_are_refused_by_every_way_to_load_it():
    def refuses(row):
        make, name, change = row
        metric = of_some_rows(make)
        metric.persistent(True)
        is_listed = isinstance(metric.metric_state[name], list) and name != "identifiers"
        kind = "metric state"
        for content, load_it in (
            (content_of(metric.state_bytes(), kind), lambda x: metric.from_bytes(saved_bytes(kind, x))),
            (metric.state_dict(), metric.load_state_dict),
            (metric.metric_state, lambda x: make().merge_state(x)),
        ):
            part = content[name]
            load_it(content)  # it is valid before the change
            with pytest.raises(ValueError, match=r"`state` must be possible|is damaged, or its dtype"):
                load_it({**content, name: [change(x) for x in part] if is_listed else change(part)})

    check_each(IMPOSSIBLE, refuses)


def test_a_folder_a_pipe_and_a_file_of_another_kind_are_no_states(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text").write_bytes(b"hello")
    for name, error, words in (
        ("pipe", ValueError, "must be a file, got a pipe"),
        ("text", ValueError, "got other content"),
        (".", OSError, "directory"),
        ("none", FileNotFoundError, "No such"),
    ):
        for load_it in (tc.ReportBuilder.load, load_calibrator):
            with pytest.raises(error, match=words):
                load_it(Path(tmp_path, name))


@pytest.mark.parametrize("case", formulas(lambda case: case.cls))
def test_the_state_of_every_metric_is_in_the_ranges_that_loading_checks(case):
    metric = case.metric()
    metric.update(*case.data(n=30))
    again = case.metric().from_bytes(metric.state_bytes())
    torch.testing.assert_close(again.compute(), metric.compute(), rtol=1e-9, atol=1e-12, equal_nan=True)
