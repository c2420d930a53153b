"""
Which classes are miscalibrated?
================================

The confidence of the predicted class is only one of many probabilities. Class-wise calibration compares the
probability of each class with its frequency. This model has 100 classes.
"""

import matplotlib.pyplot as plt
from example_data import predictions

import torchcalib

images = predictions("cifar100_resnet20")
print(images)
options = {"task": "multiclass", "from_logits": True}
metric = torchcalib.ECE(num_classes=100, mode="classwise", from_logits=True)
metric.update(images.preds, images.target)
torchcalib.plots.classwise_reliability_diagrams(metric)[0].figure

# %%
# The panels show the six classes with the largest expected calibration error (ECE), the largest first. In each panel
# the confidence is the probability of one class. The event is that the image belongs to this class.
#
# Most probabilities of a class are close to 0, because most images belong to other classes. The error of each class is
# therefore small, and the mean over the classes is small too. It cannot be compared with the error of the predicted
# class.

top_label = torchcalib.functional.ece(images.preds, images.target, **options)
print(
    f"ECE of the predicted class {top_label:.4f}, mean over the classes {metric.compute():.4f}"
)

# %%
# The expected signed calibration error (ESCE) is the frequency of a class minus the mean of its probabilities. Positive
# bars are classes that the model predicts too rarely.

esce = torchcalib.functional.esce(
    images.preds, images.target, mode="classwise", average=None, **options
)
values, order = esce.sort()
fig, ax = plt.subplots(figsize=(6.2, 3.4))
ax.bar(
    range(100), values, color=["#d1661a" if v < 0 else "#2f6db5" for v in values], width=1.0
)
ax.set(
    xlabel="classes in the order of their signed error",
    ylabel="frequency minus mean probability",
)
ax.set_title("Expected signed calibration error of each class")
plt.show()

# %%
# The test has one p-value for all classes together. A small one is evidence that at least one class is miscalibrated.

print(metric.test(n_replicates=99))
