"""
When does a model become over-confident during training?
========================================================

A small network is trained on 250 images of digits. `torchcalib.Monitor` evaluates the validation data after each
epoch, and warns if the over-confidence grows.
"""

import warnings

import torch
from sklearn.datasets import load_digits
from torch import nn

import torchcalib

digits = load_digits()
torch.manual_seed(0)
x, y = torch.from_numpy(digits.data / 16).float(), torch.from_numpy(digits.target).long()
order = torch.randperm(len(y))
train, valid = order[:250], order[250:]
model = nn.Sequential(
    nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
monitor = torchcalib.Monitor(task="multiclass", num_classes=10, from_logits=True)

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for epoch in range(1, 61):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[train]), y[train]).backward()
        optimizer.step()
        with torch.no_grad():
            monitor.update(model(x[valid]), y[valid])
        values = monitor.end_epoch(epoch)  # for a logger: {"val/nll": ..., "val/ece": ...}

for warning in caught:
    print(warning.message)

# %%
# Each panel shows a metric of the validation data. The first one is the negative log-likelihood (NLL). Its minimum is
# the best epoch for a model that reports probabilities.
#
# The entropic calibration difference (ECD) is positive if the model is over-confident. It is negative in the first
# epochs, because an untrained model predicts almost equal probabilities.
#
# After the minimum of the NLL, the accuracy changes little, but the confidence rises towards 1. The expected
# calibration error (ECE) rises too.

torchcalib.plots.training_curve(monitor.history).figure

# %%
# The history contains all values, for example of the best and the last epoch. Stop early, or apply temperature scaling
# to the last model.

for name, row in {"best": monitor.history.best, "last": monitor.history.rows[-1]}.items():
    print(
        f"{name} epoch {row.epoch}: NLL {row.values['nll']:.3f}, accuracy {row.values['accuracy']:.1%}"
    )

# %%
# The guide describes :doc:`training with a penalty </guide/training>` against over-confidence.
