"""Names that people know from other packages work, or the error names the right one.

A row has what is typed, and what must happen: a part of the error, or "works". Names in errors must exist.
"""

import re
import shlex
from dataclasses import fields
from operator import attrgetter

import numpy as np
import pytest
import torch
from helpers.reports import quick_report

import torchcalib as tc
from torchcalib.cli import main

NAMES = """
tc.accuracy_score                        `torchcalib.accuracy`
tc.brier_score_loss                      `torchcalib.brier_score`
tc.log_loss                              `torchcalib.nll`
tc.CalibratedClassifierCV                `torchcalib.sklearn.CalibratedClassifier`
tc.CalibrationDisplay                    `torchcalib.sklearn.CalibrationDisplay`
tc.IsotonicRegression                    `torchcalib.IsotonicCalibration`
tc.roc_auc_score                         `torchcalib.correctness_auroc` for confidences
tc.make_scorer                           `torchcalib.sklearn.get_scorer`
tc.ece_scorer                            `torchcalib.sklearn.get_scorer`
tc.sklearn.get_scorer('ece')             'neg_ece'
tc.sklearn.get_scorer('brier')           'neg_brier_score'
tc.sklearn.get_scorer('neg_log_loss')    'neg_nll'
tc.sklearn.get_scorer('esce')            'neg_abs_esce'
tc.sklearn.get_scorer('neg_accuracy')    'accuracy'
tc.CalibrationError                      `torchcalib.torchmetrics.CalibrationError`
tc.MulticlassCalibrationError            `torchcalib.torchmetrics.MulticlassCalibrationError`
tc.binary_calibration_error              `torchcalib.torchmetrics.binary_calibration_error`
tc.classification                        `torchcalib.torchmetrics`
tc.MetricCollection                      `torchcalib.CalibrationCollection`
tc.metrics.ECE                           works
tc.metrics.ece                           works
tc.metrics.ExpectedCalibrationError      `torchcalib.ECE`
tc.functional.expected_calibration_error  `torchcalib.ece`
tc.functional.ECE                        `torchcalib.ECE`
tc.losses.ece                            `torchcalib.ece`
tc.losses.FocalLoss                      `torchcalib.losses.SoftBinnedECELoss`
tc.ECELoss                               `torchcalib.losses.ECELoss`
tc.inference.bootstrp                    `torchcalib.inference.bootstrap`
tc.ClasswiseECE                          `torchcalib.ECE` with mode='classwise'
tc.classwise_ece                         `torchcalib.ece` with mode='classwise'
tc.TemperatureScaler                     `torchcalib.TemperatureScaling`
tc.ModelWithTemperature                  `torchcalib.TemperatureScaling`
tc.LogisticCalibration                   `torchcalib.AffineScaling`
tc.calibration.LogisticCalibration       `torchcalib.AffineScaling`
tc.calibration.MatrixScaling             closest is `torchcalib.StructuredMatrixScaling`
tc.BBQ                                   `torchcalib.BayesianBinning`
tc.ENIR                                  closest is `torchcalib.IsotonicCalibration`
tc.venn_abers                            `torchcalib.VennAbersCalibration`
tc.scaling                               `torchcalib.calibration`
tc.presentation                          `torchcalib.plots`
tc.ReliabilityDiagram                    `torchcalib.reliability_diagram`
tc.ECE(10)                               Pass n_bins=10 by name.
tc.ECE(task='binary').measure            with predictions and targets
tc.calibration_slope                     Use `torchcalib.cox`
tc.calibration_in_the_large              Use `torchcalib.cox`
tc.val_prob                              `torchcalib.report` for all values
tc.hosmer_lemeshow                       There is no Hosmer-Lemeshow statistic.
tc.spiegelhalter_test                    `torchcalib.spiegelhalter`
tc.reliabilitydiag                       `torchcalib.reliability_diagram`
tc.brier_decomposition                   `torchcalib.corp` with component='mcb', 'dsc' or 'unc'
tc.pava                                  `torchcalib.corp_curve`
tc.e90                                   `torchcalib.ici` with component='e50', 'e90' or 'emax'
tc.loess_calibration                     `torchcalib.ici`
tc.prior_shift                           `torchcalib.BiasCorrection`
tc.kuiper                                `torchcalib.ks` with norm='range'
tc.bootstrap_ci                          `torchcalib.bootstrap`
test.pvalue                              `p_value`
test.confidence_interval()               `low` and `high`
test.to_dict()                           vars(test)
tc.report()                              Call Report.from_predictions(preds).
tc.Report.load('a.html')                 load report.json
tc.Report.load('a.csv')                  Report.from_files reads predictions.
tc.ece(p, y, ci=0.95)                    torchcalib.inference.bootstrap
tc.ece(p, y, threshold=0.5)              Calibration metrics have no threshold.
tc.ece(p, y, num_bins=5)                 Did you mean `n_bins`?
tc.bootstrap(tc.ece, p, y, n_resamples=99)         Did you mean `n_replicates`?
tc.bootstrap(tc.ece, p, y, confidence_level=0.9)   Did you mean `level`?
tc.bootstrap((p, y), tc.ece)             Call bootstrap(metric, preds, target).
tc.bootstrap('ece', p, y)                must be a function such as torchcalib.functional.ece
tc.report(p, y, label=y)                 Did you mean `target`?
tc.report(p, y, by=y)                    Did you mean `groups`?
tc.ECE(task='binary').confidence_interval          Call test() for the interval
report.to_frame()                        `to_pandas`
report.to_csv('a.csv')                   to_pandas().to_csv(path)
report.to_html('a.html')                 Call save(path)
report.summary()                         Print the object.
report.ece                               Use ['ece'].
report['log_loss'] == report['nll']      works
report['brier_score'] == report['brier'] == report['brier_score_loss']   works
report.main_table.df                     `to_pandas`
scaling.temperature_                     `temperature`
scaling.save('a.pt')                     torchcalib.save_calibrator
scaling.fit_transform(p, y)              predict_proba
tc.load_report                           `torchcalib.Report.load`
"""

COMMANDS = """
ece                                      `torchcalib metric ece`
a.npz                                    `torchcalib report a.npz`
'no such.csv'                            `torchcalib report no such.csv`
reprot a.npz                             `torchcalib report`
fit a.npz                                `torchcalib calibrate`
test a.npz                               `torchcalib check`
smooth_ece a.npz                         works
Brier a.npz                              works
brier_score_loss a.npz                   works
metric log_loss a.npz                    works
metric expected_calibration_error a.npz  works
metric corect_auroc a.npz                `correctness_auroc`
metric eec a.npz                         Names are accuracy,
metric auroc a.npz                       `torchcalib.correctness_auroc` for confidences
check a.npz --fail-if 'log_loss > 9 or p(ece) < 0'      works
check a.npz --fail-if 'brier_score > 2 or brier > 2'    works
check a.npz --fail-if '-ece > 1'         must compare report values
check a.npz --fail_if 'ece > 1'          --fail-if
check a.npz --max-ece 0.05               --fail-if
report a.npz --fail-if 'ece > 0.05'      --fail-if is an option of torchcalib check
report a.npz --jsn                       --json
report a.npz --format json               --json prints the result as JSON
report a.npz --ci 0.9                    See `torchcalib report --help`
report a.npz --html a.html               --out
report a.npz --output-dir a              --out
report a.npz -o a                        --out
report a.npz --bins=3                    --n-bins
report a.npz --n_bins 3                  --n-bins
report a.npz --label y                   --target
report a.npz --trget y                   --target
report a.npz --group-by y                --groups
report a.npz --grops y                   --groups
report a.npz --id row                    --id is an option of torchcalib audit and compare
report a.npz --nonsense                  See `torchcalib report --help`
compare a.npz a.npz --metric nll         `torchcalib metric` is a command
calibrate a.npz --method isotonic --output c.pt         --calibrator
calibrate a.npz --output c.pt            --out
calibrate a.npz --out c.pt --calibrator temperature     `TemperatureScaling`
calibrate a.npz --out c.pt --calibrator LogisticCalibration   `AffineScaling`
demo a.npz                               unrecognized arguments: `a.npz`
report -                                 standard input, which is not read
"""


def rows(text):
    """Return a test case for each line of a table, whose columns are separated by two spaces."""
    pairs = [re.split(r" {2,}", line) for line in text.strip().splitlines()]
    return [pytest.param(*pair, id=pair[0]) for pair in pairs]


def assert_names_exist(message):
    for name in re.findall(r"`torchcalib\.([\w.]+)`", message):
        attrgetter(name)(tc)


def objects():
    """Return the objects in the table by their names."""
    p, y = torch.tensor([0.2, 0.7, 0.9, 0.4]), torch.tensor([0, 1, 1, 0])
    test = tc.calibration_test(p, y, n_replicates=39)
    scaling = tc.TemperatureScaling().fit([0.9, 0.99, 0.01, 0.8, 0.05], [1, 0, 0, 1, 0])
    return {"tc": tc, "p": p, "y": y, "test": test, "scaling": scaling, "report": quick_report("binary")}


@pytest.mark.parametrize(("typed", "expected"), rows(NAMES))
def test_names(typed, expected):
    if "sklearn." in typed:
        pytest.importorskip("sklearn")
    if expected == "works":
        assert eval(typed, objects()) is not False
        return
    with pytest.raises((AttributeError, TypeError, ValueError)) as caught:
        eval(typed, objects())
    assert expected in str(caught.value)
    assert_names_exist(str(caught.value))


@pytest.mark.parametrize(("typed", "expected"), rows(COMMANDS))
def test_commands(typed, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    np.savez("a.npz", probs=np.array([0.2, 0.7, 0.9, 0.4]), targets=np.array([0, 1, 1, 0]))
    words = shlex.split(typed)
    if expected == "works":
        assert main(words) == 0
        return
    try:
        code = main(words)
    except SystemExit as error:
        code = error.code
    message = capsys.readouterr().err
    assert code == 2
    assert expected in message.splitlines()[-1]
    if "must be an option" in message:
        assert message.startswith(f"usage: torchcalib {words[0]} ")


@pytest.mark.parametrize("name", ["ENCE", "EEC", "_ece", "unrelated"])
def test_error_for_an_unknown_name_suggests_no_other_quantity(name):
    with pytest.raises(AttributeError) as caught:
        getattr(tc, name)
    assert "Did you mean" not in str(caught.value)
    assert not hasattr(tc, name)


def test_an_error_within_a_property_is_not_hidden():
    class Broken(tc.Report):
        @property
        def broken(self):
            return self.settings.nothing

    report = quick_report("binary")
    broken = Broken(**{each.name: getattr(report, each.name) for each in fields(report)})
    with pytest.raises(AttributeError, match="'dict' object has no attribute 'nothing'"):
        _ = broken.broken
