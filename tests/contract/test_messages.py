"""Every message states the rule, the value found and a remedy that works. Its rows are in `messages.py`."""

import shlex
import warnings
from functools import partial

import pytest
import torch
from contract import messages
from contract.messages import AREAS, COMMANDS, MISTAKES, SUSPICIOUS, WARNINGS
from helpers.refusals import Refusal, assert_message, assert_refused
from helpers.reports import QUICK

import torchcalib as tc
import torchcalib.functional as F
from torchcalib.calibration import BiasCorrection
from torchcalib.cli import main
from torchcalib.cli.messages import _ARGUMENT
from torchcalib.inference import calibration_test


def rows_of_areas():
    for area, rows in AREAS.items():
        for row in (each if isinstance(each, Refusal) else Refusal(*each) for each in rows):
            yield pytest.param(row, id=f"{area}: {row.text[:50]}")


@pytest.mark.parametrize("row", list(rows_of_areas()))
@pytest.mark.filterwarnings("ignore")
def test_wrong_calls_raise_errors_with_rule_and_value_and_the_advised_call_works(row):
    assert_refused(row)
    if row.remedy is not None:
        row.remedy()


def made(cls, options):
    return cls(**options, **({"num_labels": messages.C} if options["task"] == "multilabel" else {}))


def streamed(cls, preds, target, weights=None, **options):
    metric = made(cls, options)
    metric.update(preds, target, weights=weights)
    return metric.compute()


def by_test(preds, target, weights=None, **options):
    return calibration_test(made(tc.ECE, options), preds, target, weights=weights, n_replicates=39).statistic


def reported(preds, target, **options):
    return tc.report(preds, target, **{"from_logits": False, **options}, **QUICK)["nll"]


def compared(preds, target, **options):
    lines = tc.compare({"a": preds, "b": preds}, target, n_replicates=99, **{"from_logits": False, **options}).lines
    return next(line for line in lines if line.key.startswith("ece")).values["a"]


def fitted(preds, target, **options):
    return BiasCorrection().fit(preds, target, **options).beta


USUAL = {"function": F.ece, "class": partial(streamed, tc.ECE), "test": by_test, "report": reported}
WAYS = USUAL | {"comparison": compared, "fit": fitted}
FUNCTIONS = (F.nll, F.brier_score, F.ecd, F.mce, partial(streamed, tc.NLL))


def rows_and_ways():
    """Yield parameters. The normal run has functions and every third of the other ways."""
    for i, row in enumerate(MISTAKES):
        for j, way in enumerate(WAYS):
            marks = [pytest.mark.extended] * ((j > 0 and (i + j) % 3 > 0) or way == "comparison")
            yield pytest.param(row, way, id=f"{row[3][:50]}-{way}", marks=marks)


@pytest.mark.parametrize(("row", "way"), list(rows_and_ways()))
@pytest.mark.filterwarnings("ignore:.*(has no samples of class|gives probability 0|divided by 100)")
def test_wrong_input_raises_the_same_error_in_every_way_and_the_advised_input_is_right(row, way):
    preds, target, options, text, *rest = row
    error, remedy = (*rest, *(ValueError, None)[len(rest) :])
    if way == "fit" and "from_logits=True" in text:  # calibrators infer it
        return
    for call in (WAYS[way], *FUNCTIONS) if way == "function" else (WAYS[way],):
        assert_refused(Refusal(partial(call, preds, target, **options), text, error))
    if remedy is not None:
        *right, how = remedy
        expected = torch.as_tensor(WAYS[way](*right, **how))
        assert not expected.isnan().any()
        if text == messages.IGNORE:  # the remedy above leaves the rows out instead
            found = WAYS[way](preds, target, **options, ignore_index=-100)
            torch.testing.assert_close(torch.as_tensor(found), expected)


def warned(call, text):
    """Check that a call gives a warning at the line of the caller."""
    with pytest.warns(UserWarning, match=text.partition(" ... ")[0]) as caught:
        found = call()
    own = [each for each in caught if each.category is not DeprecationWarning]
    assert len({str(each.message) for each in own}) == 1
    assert_message(str(own[0].message), text)
    assert {each.filename for each in own} <= {__file__, messages.__file__}
    return found


@pytest.mark.parametrize("way", USUAL)
@pytest.mark.parametrize("name", SUSPICIOUS)
def test_suspicious_input_causes_one_warning_that_the_advised_options_silence(name, way):
    preds, target, options, text, remedy = SUSPICIOUS[name]
    warned(lambda: USUAL[way](preds, target, **options), f"`preds` must be ... {text}")
    if remedy is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.as_tensor(USUAL[way](preds, target, **remedy)).isfinite().all()


@pytest.mark.parametrize("row", WARNINGS, ids=lambda row: row[1][:50])
def test_warnings_state_the_problem_at_the_caller_and_the_advised_call_is_silent(row):
    call, text, remedy = row
    warned(call, text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        remedy()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write the files of the commands."""
    path = tmp_path_factory.mktemp("commands")
    messages.write_files(path)
    return path


@pytest.mark.parametrize("row", COMMANDS, ids=lambda row: f"{row[0]}"[:60])
def test_wrong_commands_give_one_line_with_options_and_exit_code_2_and_the_advised_command_works(
    row, folder, monkeypatch, capsys
):
    command, text, *remedy = row
    monkeypatch.chdir(folder)

    def run(line):
        try:
            code = main(shlex.split(line))
        except SystemExit as left:  # raised by argparse
            code = left.code
        return code, capsys.readouterr()

    code, printed = run(command)
    line = printed.err.splitlines()[-1].partition("error: ")[2]
    assert (code, printed.out) == (2, "")
    assert printed.err.startswith("usage: torchcalib") or printed.err.count("\n") == 1
    assert_message(line, text)
    assert not _ARGUMENT.search(line), "options must have the names of the command line"
    for line in remedy:
        code, printed = run(line)
        assert code == 0, printed.err
