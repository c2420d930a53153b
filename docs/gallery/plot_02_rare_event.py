"""
Is a model calibrated for a rare event?
=======================================

One of eight ImageNet images shows a dog. Two models predict the probability of a dog. The expected calibration error
(ECE) of both is below 0.01. But the test-based calibration error (TCE) is large: a test rejects many predictions.
"""

from example_data import predictions

import torchcalib

models = {name: predictions(f"imagenet_dogs_{name}") for name in ("alexnet", "resnet18")}
for name, model in models.items():
    print(model)
    ece = torchcalib.functional.ece(model.preds, model.target, task="binary")
    tce = torchcalib.functional.tce(model.preds, model.target, task="binary")
    print(f"{name}: ECE {ece:.4f}, TCE {tce:.1f}%")

# %%
# Most predictions are far below 0.01. For ECE, a prediction of 0.001 is almost perfect if the true frequency is 0.003:
# the difference is 0.002. But the event is three times as frequent as predicted.
#
# TCE tests each prediction with the exact binomial test against the outcomes in its bin. It is the percentage of
# rejected predictions. The test is as strict for a prediction of 0.001 as for a prediction of 0.5.

model = models["alexnet"]
torchcalib.plots.tce_diagram(
    model.preds, model.target, logit=True, title="AlexNet, dogs against the rest"
).figure

# %%
# The axis of probabilities is logarithmic at both ends. Each violin shows the predictions in a bin, and the diamond
# their empirical frequency. The bars at the bottom show the rejected part of each bin.
#
# If you have predictions for all classes, you do not have to add them up. `positive_classes` evaluates a set of classes
# against the rest. Here it contains the six animals of CIFAR-10, and then the class of dogs.

images = predictions("cifar10_resnet20")
print(images)
options = {"task": "multiclass", "from_logits": True}
for name, classes in {"animals": [2, 3, 4, 5, 6, 7], "dogs": [5]}.items():
    ece = torchcalib.functional.ece(
        images.preds, images.target, positive_classes=classes, **options
    )
    tce = torchcalib.functional.tce(
        images.preds, images.target, positive_classes=classes, **options
    )
    print(f"{name} against the rest: ECE {ece:.4f}, TCE {tce:.1f}%")
