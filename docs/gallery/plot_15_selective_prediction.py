"""
How many predictions should a person check?
===========================================

A model decides the cases in which it is confident, and a person decides the others. The fraction of cases that the
model decides is the coverage. The error rate of these cases is the selective risk.
"""

from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_predict
from sklearn.naive_bayes import GaussianNB
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import torchcalib

x, y = load_digits(return_X_y=True)
models = {
    "naive Bayes": GaussianNB(),
    "logistic regression": make_pipeline(StandardScaler(), LogisticRegression(C=0.01)),
    "random forest": RandomForestClassifier(60, max_depth=6, random_state=0),
}
probs = {
    name: cross_val_predict(model, x, y, cv=3, method="predict_proba")
    for name, model in models.items()
}
torchcalib.plots.risk_coverage_curve(probs, y).figure

# %%
# Each curve sorts the predictions by their confidence. The right end is the error rate of all predictions. A good curve
# falls quickly to the left: the errors are among the least confident predictions.
#
# The area under the risk-coverage curve (AURC) summarises it. The coverage at a risk is the largest fraction of cases
# with at most this error rate.

print(f"{'':20}  AURC   coverage at 1% risk   error rate at 80% coverage")
for name, p in probs.items():
    aurc = torchcalib.functional.aurc(p, y, task="multiclass")
    coverage = torchcalib.functional.coverage_at_risk(p, y, task="multiclass", risk=0.01)
    risk = torchcalib.functional.risk_at_coverage(p, y, task="multiclass", coverage=0.8)
    print(f"{name:20} {aurc:.4f} {coverage:15.1%} {risk:23.2%}")

# %%
# Selective prediction and calibration are different properties. Selection needs only the order of the confidences. A
# calibrator such as temperature scaling hardly changes this order. The random forest has a large expected calibration
# error (ECE): an average of many trees is rarely close to 1. But its confidences order the cases well.

for name, p in probs.items():
    ece = torchcalib.functional.ece(p, y, task="multiclass")
    auroc = torchcalib.functional.correctness_auroc(p, y, task="multiclass")
    print(
        f"{name:20} ECE {ece:.3f}, "
        f"probability that a correct prediction is more confident {auroc:.3f}"
    )

# %%
# Choose the threshold of the confidence on validation data. See `Geifman and El-Yaniv (2017)
# <https://arxiv.org/abs/1705.08500>`_ for selective prediction, and `Geifman, Uziel and El-Yaniv (2019)
# <https://arxiv.org/abs/1805.08206>`_ for AURC.
