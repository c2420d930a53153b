"""The command line replaces arguments in errors by its options."""

import pytest

from torchcalib.cli.messages import line_of
from torchcalib.io.errors import InputError


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("Pass preds='NAME' and target='NAME'.", "Pass --preds NAME --target NAME."),
        (
            "Pass task='multilabel', or task='multiclass' (one-hot).",
            "Pass --task multilabel, or --task multiclass (one-hot).",
        ),
        ("Pass from_logits=True or from_logits=False.", "Pass --from-logits or --from-probs."),
        ("pass from_logits=False, normalize=True.", "pass --from-probs --normalize."),
        ("Pass class_names=['World', \"it's\"] if so.", "Pass --class-names World,it's if so."),
        ("with class_names=[...].", "with --class-names."),
        ("class_names=['A', 'B', ...].", "--class-names A,B,...."),
        ("Pass ignore_index=-100, the default.", "Pass --ignore-index -100, the default."),
        ("nan_policy='drop' drops rows.", "--nan-policy drop drops rows."),
        ("Omit from_logits=True for probabilities.", "Pass --from-probs for probabilities."),
        ("`n_bins` must be an int, got 1.5.", "`--n-bins` must be an int, got 1.5."),
        (
            "`other` must have the same arguments, got n_bins=13 instead of n_bins=11.",
            "every part must have the same arguments, got --n-bins 13 instead of --n-bins 11.",
        ),
        (
            "`other` must have groups if this builder has groups. Pass `groups` to `update` of both builders.",
            "every part must have groups if another part has groups. Pass --groups for every part.",
        ),
        (
            "`other` must contain no predictions of this builder. Merge each builder once.",
            "every part must contain no predictions of another part. Merge each part once.",
        ),
        ("Pass average=None, mode='classwise'.", "Pass average=None, mode='classwise'."),
    ],
)
def test_arguments_become_options(message, line):
    assert line_of(ValueError(message)) == line


def test_only_errors_for_files_name_an_option_by_the_name_of_data():
    message = "`preds` must be floats, got `preds`."
    assert line_of(ValueError(message)) == message
    assert line_of(InputError(message)) == "`--preds` must be floats, got `preds`."
    assert line_of(InputError("`preds` in `a.npz` must be floats.")) == "`preds` in `a.npz` must be floats."
