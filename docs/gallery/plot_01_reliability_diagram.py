"""
How do I read a reliability diagram?
====================================

A reliability diagram compares the confidence of a classifier with the frequency of correct predictions. This example
shows bins, counts, consistency bands, a smooth curve and a logit axis.
"""

from example_data import predictions

import torchcalib

images = predictions("cifar10_resnet20")
print(images)
torchcalib.plots.reliability_diagram(images.preds, images.target, from_logits=True).figure

# %%
# The predictions are divided into 15 bins by their confidence, the probability of the predicted class. Each mark is a
# bin: its mean confidence is on the horizontal axis, and its accuracy on the vertical axis. Larger marks have more
# samples, and the strip at the top shows the counts.
#
# A calibrated model has marks near the diagonal. Filled marks below the diagonal are over-confident: the predictions
# are correct less often than their confidence. Hollow marks above it are under-confident.
#
# The grey boxes are consistency bands. The mark of a calibrated model is inside its box with probability 95%. A mark
# far outside of its box is evidence against calibration. A box is large if its bin has few samples.
#
# The expected calibration error (ECE) is the mean distance of the marks from the diagonal, weighted by the counts. The
# table contains the same data.

torchcalib.functional.calibration_curve(
    images.preds, images.target, task="multiclass", from_logits=True
)

# %%
# A smooth curve does not depend on bins. Its kernel width is selected from the data, and the legend contains the smooth
# calibration error (smECE).

torchcalib.plots.reliability_diagram(
    images.preds, images.target, from_logits=True, smooth=True
).figure

# %%
# Probabilities of rare events are close to 0, where linear axes hide them. Bins with equal numbers of samples and a
# logit axis show them: on this axis the distance from 0.001 to 0.01 is as large as that from 0.01 to 0.1.

dogs = predictions("imagenet_dogs_alexnet")
print(dogs)
metric = torchcalib.ACE(task="binary", n_bins=30)
metric.update(dogs.preds, dogs.target)
torchcalib.plots.reliability_diagram(metric, logit=True).figure
