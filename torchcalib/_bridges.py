"""Names of other packages with the equivalent names in torchcalib, for advice in errors.

The other packages are scikit-learn, torchmetrics, netcal, scipy and pandas, and packages of R. A suggestion never names
a different quantity.
"""

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING


def _by_other(table: Mapping[str, str]) -> dict[str, str]:
    """Return the entry of each word, from a table of words by entry."""
    return {other: own for own, others in table.items() for other in others.split()}


NAMES = _by_other(
    {
        # metrics
        "accuracy": "accuracy_score",
        "ace": "adaptive_calibration_error adaptive_ece",
        "ACE": "AdaptiveCalibrationError AdaptiveECE",
        "brier_score": "brier brier_loss brier_score_loss",
        "BrierScore": "Brier BrierLoss",
        "correctness_auroc": "misclassification_auroc",
        "eaurc": "e_aurc excess_aurc",
        "ece": "compute_ece ece_score expected_calibration_error get_ece",
        "ECE": "ExpectedCalibrationError",
        "ici": "integrated_calibration_index",
        "ks": "ks_calibration_error",
        "mce": "max_calibration_error maximum_calibration_error",
        "MCE": "MaximumCalibrationError",
        "nll": "cross_entropy log_loss logloss negative_log_likelihood",
        "NLL": "CrossEntropy LogLoss NegativeLogLikelihood",
        "rmsce": "rms_calibration_error root_mean_squared_calibration_error",
        "smece": "smooth_ece",
        "SmECE": "SmoothECE",
        "spiegelhalter": "spiegelhalter_test spiegelhalter_z",
        # calibrators
        "AffineScaling": "LogisticCalibration",
        "BayesianBinning": "BBQ BayesianBinningIntoQuantiles",
        "BetaCalibration": "BetaCal beta_calibration",
        "DirichletCalibration": "Dirichlet FullDirichletCalibrator",
        "HistogramBinning": "histogram_binning",
        "IsotonicCalibration": "IsotonicRegression isotonic_calibration",
        "PlattScaling": "PlattCalibration SigmoidCalibration platt_scaling",
        "sklearn.CalibratedClassifier": "CalibratedClassifierCV",
        "TemperatureScaling": "ModelWithTemperature TemperatureCalibration TemperatureScaler temperature_scaling",
        "VennAbersCalibration": "VennAbers VennAbersCalibrator VennAbersCV venn_abers",
        # tests, diagrams, reports
        "bootstrap": "boot bootstrap_ci bootstrap_interval confidence_interval ece_ci",
        "CalibrationCollection": "MetricCollection",
        "calibration_curve": "reliability_curve reliability_table",
        "calibration_test": "miscalibration_test test_calibration",
        "integrations.CalibrationMonitor": "CalibrationCallback",
        "reliability_diagram": "ReliabilityDiagram ReliabilityDisplay calibration_plot plot_calibration_curve "
        "plot_reliability plot_reliability_diagram reliability_plot reliabilitydiag",
        "Report.load": "load_report read_report",
        "tce_diagram": "test_based_reliability_diagram",
        "testing.assert_calibrated": "assert_calibrated",
        "torchmetrics.BinaryCalibrationError": "BinaryCalibrationError",
        "torchmetrics.CalibrationError": "CalibrationError",
        "torchmetrics.MulticlassCalibrationError": "MulticlassCalibrationError",
        "torchmetrics.binary_calibration_error": "binary_calibration_error",
        "torchmetrics.calibration_error": "calibration_error",
        "torchmetrics.multiclass_calibration_error": "multiclass_calibration_error",
        # modules
        "calibration": "binning calibrators scaling",
        "inference": "stats",
        "losses": "regularization",
        "plots": "presentation visualization viz",
        "torchmetrics": "classification",
        # sentences, where no name has the same meaning
        "Did you mean `torchcalib.ece` with mode='classwise'?": "classwise_ece static_calibration_error",
        "Did you mean `torchcalib.ECE` with mode='classwise'?": "ClasswiseECE SCE",
        "Use `torchcalib.CorrectnessAUROC` for confidences, and torchmetrics.AUROC for classes.": "AUROC",
        "Use `torchcalib.correctness_auroc` for confidences, and torchmetrics for classes.": "auc auroc roc_auc_score",
        "It is an error of regression models. `torchcalib.nees` measures their consistency.": "ENCE ence",
        "Add a penalty such as `torchcalib.losses.SoftBinnedECELoss` to the training loss.": "FocalLoss SoftECE "
        "focal_loss soft_ece",
        "Use `torchcalib.sklearn.get_scorer`('neg_ece').": "ece_scorer make_scorer",
        "There is no such calibrator. The closest is `torchcalib.StructuredMatrixScaling`: a matrix with ridge "
        "penalties.": "MatrixScaling MatrixScaler",
        "There is no such calibrator. The closest is `torchcalib.IsotonicCalibration`.": "ENIR NearIsotonicRegression",
        "Use `torchcalib.cox`: it returns the slope and the intercept of Cox's calibration model.": "calibration_slope "
        "calibration_intercept calibration_in_the_large cox_calibration weak_calibration",
        "Use `torchcalib.report` for all values, and `torchcalib.cox` for slope and intercept.": "val_prob valProb",
        "There is no Hosmer-Lemeshow statistic. `torchcalib.calibration_test` tests the same hypothesis.": "hl_test "
        "hoslem_test hosmer_lemeshow hosmer_lemeshow_test",
        "Use `torchcalib.corp` with component='mcb', 'dsc' or 'unc'.": "brier_decomposition "
        "brier_score_decomposition murphy_decomposition score_decomposition",
        "Use `torchcalib.corp_curve` for the curve, and `torchcalib.IsotonicCalibration` for new data.": "gpava "
        "isoreg isotonic_regression pav pava",
        "Use `torchcalib.BiasCorrection` for shifted class frequencies.": "label_shift prior_correction prior_shift",
        "Use `torchcalib.ici` with component='e50', 'e90' or 'emax'.": "e50 e90 emax",
        "`torchcalib.ici` is the mean distance to a local regression (loess).": "loess loess_calibration lowess",
        "Use `torchcalib.ks` with norm='range'.": "ecce_r kuiper kuiper_calibration_error",
    }
)
"""Public names by the equivalent name of another package, or a sentence that contains public names."""

ARGUMENTS = _by_other(
    {
        "n_bins": "bins n_bin nbins num_bins",
        "target": "label labels targets y y_true",
        "preds": "probs y_pred y_prob y_proba y_score",
        "from_logits": "logits",
        "weights": "weight sample_weight sample_weights",
        "clusters": "cluster",
        "groups": "by group group_by groupby model",
        "class_names": "names target_names",
        "num_classes": "n_classes",
        "num_labels": "n_labels",
        "positive_classes": "pos_label",
        "ignore_index": "ignore_idx",
        "n_replicates": "n_bootstrap n_bootstraps n_resamples",
        "level": "ci conf_level confidence_level return_ci",
        "seed": "random_state",
    }
)
"""Arguments of functions and classes, and options of commands, by the equivalent name of another package."""

OPTIONS = _by_other(
    {
        "calibrator": "method",
        "fail_if": "fail_under max_ece",
        "out": "html o outdir output output_dir",
        "--json prints the result as JSON. The ending of --out selects other formats.": "format",
    }
)
"""Further options of commands by another name, or a sentence that contains options."""

_ATTRIBUTES = (
    ("p_value", "", "p p_val pval pvalue"),
    ("p_value", "Its attributes are vars(test).", "as_dict to_dict"),
    ("low", "The attributes `low` and `high` are the ends of the interval.",
     "ci conf_int confidence_interval interval"),
    ("to_pandas", "", "dataframe df to_dataframe to_df to_frame"),
    ("to_pandas", "Call to_pandas().to_csv(path).", "to_csv"),
    ("save", "Call save(path): the ending .html, .json, .md or .tex selects the format.", "export to_html write"),
    ("sentence", "Print the object. Its attribute `sentence` has the verdict.", "describe summary"),
    ("predict_proba", "Call the fitted calibrator with predictions, or its method predict_proba.",
     "calibrate fit_transform predict transform"),
    ("predict_proba", "Call torchcalib.save_calibrator(calibrator, path).", "dump save"),
    ("temperature", "", "T temp temperature_"),
    ("test", "Call test() for the interval, noise floor and p-value of a calibration error, or "
     "torchcalib.Bootstrapped(metric) for an interval of any metric.",
     "ci confidence_interval interval noise_floor p_value pvalue"),
    ("update", "Call the metric with predictions and targets, or its methods update and compute.",
     "measure result score"),
)  # fmt: skip
"""Attribute of an object, a sentence about it (or ""), and its names in other packages."""


SHORTEST = 6
"""Smallest length of a name of a metric that is compared with similar ones: ECE and ENCE are different quantities."""


def nearest(
    word: str, known: Collection[str], cutoff: float = 0.8, *, shortest: int = 0, table: Mapping[str, str] | None = None
) -> str | None:
    """Return the known name that a person means by `word`: by the table, or else the most similar one; or None.

    Args:
        word: the unknown name.
        known: names that exist.
        cutoff: smallest similarity, in [0, 1].
        shortest: smallest length of a word that is compared; `SHORTEST` for names of metrics.
        table: names by the equivalent name of another package.
    """
    if table is not None and table.get(word) in known:
        return table[word]
    return next(iter(get_close_matches(word, known, 1, cutoff)), None) if len(word) >= shortest else None


def unknown_attribute(owner: object, name: str) -> AttributeError:
    """Return the error for an unknown attribute of an object, with the attribute that a person means."""
    message = f"{type(owner).__name__!r} object has no attribute {name!r}"
    if name.startswith("_"):  # Python and torch look up many private names
        return AttributeError(message)
    if isinstance(owner, Mapping) and name in owner:
        return AttributeError(f"{message}. Use [{name!r}].")
    there = dir(owner)
    for own, sentence, others in _ATTRIBUTES:
        if own in there and name in others.split():
            return AttributeError(f"{message}. {sentence or f'Did you mean `{own}`?'}")
    return AttributeError(message)


class Advising:
    """Base class of objects whose error for an unknown attribute names the right one."""

    if not TYPE_CHECKING:  # type checkers find unknown attributes

        def __getattr__(self, name: str) -> object:
            """Raise AttributeError for an unknown attribute, or again for one that a property raised."""
            if hasattr(type(self), name):
                return object.__getattribute__(self, name)
            raise unknown_attribute(self, name)
