"""
Why is temperature scaling not sufficient for this model?
=========================================================

GPT-2 classifies news without training on this task. It prefers one topic, whatever the text is. A temperature cannot
correct this, but one number for each class can.
"""

import matplotlib.pyplot as plt
import torch
from example_data import predictions

import torchcalib
from torchcalib.calibration import (
    AffineScaling,
    BiasCorrection,
    TemperatureScaling,
    cross_val_calibrate,
)

news = predictions("agnews_gpt2")
print(news)
options = {"task": "multiclass", "from_logits": True}
names = ["World", "Sports", "Business", "Technology"]
frequency = torch.bincount(news.target, minlength=4) / len(news.target)
probability = news.preds.softmax(-1).mean(0)

fig, ax = plt.subplots(figsize=(6.2, 3.4))
x = torch.arange(4)
ax.bar(x - 0.2, probability, 0.4, color="#d1661a", label="mean probability")
ax.bar(x + 0.2, frequency, 0.4, color="#2f6db5", label="frequency")
ax.set_xticks(x, names)
ax.set_title("Predicted and actual class frequencies")
ax.legend()
plt.show()

# %%
# The four topics are equally frequent, but their mean probabilities differ. The diagnosis of a report names this cause.

report = torchcalib.report(
    news.preds, news.target, class_names=names, with_intervals=False, from_logits=True
)
print(report.decision.sentence)
print(report.decision.action)

# %%
# The report recommends a calibrator by its negative log-likelihood (NLL). Three simple ones are compared here
# by cross-validation. Temperature scaling has one parameter. Bias correction adds one number to the log-probability of
# each class, and affine scaling combines both.

for name, calibrator in {
    "temperature scaling": TemperatureScaling(),
    "bias correction": BiasCorrection(),
    "affine scaling": AffineScaling(),
}.items():
    calibrated = cross_val_calibrate(
        news.preds, news.target, calibrator=calibrator, **options
    )
    nll = torchcalib.functional.nll(calibrated, news.target, **options)
    accuracy = torchcalib.functional.accuracy(calibrated, news.target, **options)
    print(f"{name:20} negative log-likelihood {nll:.3f}, accuracy {accuracy:.1%}")

# %%
# Temperature scaling cannot change the predicted class, so the accuracy stays low. Bias correction changes it: the
# model contains more information about the topic than its raw predictions show.
#
# This is typical for language models with a prompt. It also occurs if the class frequencies differ from those of the
# training data.

calibrated = cross_val_calibrate(
    news.preds, news.target, calibrator=AffineScaling(), **options
)
curves = {"before": (news.preds, news.target), "affine scaling": (calibrated, news.target)}
torchcalib.plots.reliability_diagram(curves, from_logits=True).figure
