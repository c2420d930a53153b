"""
How much does recalibration improve a model?
============================================

Temperature scaling divides all logits by one number. Affine scaling also adds a number to the logits of each class.
Both are fitted by maximum likelihood. See `Guo et al. (2017) <https://arxiv.org/abs/1706.04599>`_.
"""

from example_data import predictions

import torchcalib
from torchcalib.calibration import AffineScaling, TemperatureScaling, cross_val_calibrate

images = predictions("cifar10_resnet20")
print(images)
options = {"task": "multiclass", "from_logits": True}
logits = {"before": images.preds}
for name, calibrator in {
    "temperature scaling": TemperatureScaling(),
    "affine scaling": AffineScaling(),
}.items():
    logits[name] = cross_val_calibrate(
        images.preds, images.target, calibrator=calibrator, **options
    )

for name, values in logits.items():
    nll = torchcalib.functional.nll(values, images.target, **options)
    ece = torchcalib.functional.ece(values, images.target, **options)
    accuracy = torchcalib.functional.accuracy(values, images.target, **options)
    print(
        f"{name:20} negative log-likelihood {nll:.3f}, "
        f"calibration error {ece:.4f}, accuracy {accuracy:.1%}"
    )

# %%
# `torchcalib.calibration.cross_val_calibrate` splits the data into five folds. The predictions of each fold are
# calibrated with a fit to the other folds. A fit to the same data would be optimistic.
#
# Temperature scaling does not change the order of the classes, so the accuracy is the same. Affine scaling can change
# it.

curves = {name: (values, images.target) for name, values in logits.items()}
torchcalib.plots.reliability_diagram(curves, from_logits=True).figure

# %%
# The curve before calibration is below the diagonal: the model is over-confident. The calibrated curves are close to
# the diagonal.
#
# Compare calibrators by a proper score, such as the negative log-likelihood (NLL), and not by the expected calibration
# error (ECE). `torchcalib.calibration.recommend` compares calibrators in this way. It prefers a simple one if the
# difference is not significant.

found = torchcalib.calibration.recommend(images.preds, images.target, **options)
print(found.text)

# %%
# A fitted calibrator is a `torch.nn.Module`. Append it to the model for new data.

calibrator = TemperatureScaling().fit(images.preds, images.target)
print(calibrator(images.preds[:1]).softmax(-1).max())

# %%
# The guide describes :doc:`all calibrators </guide/calibrators>`.
