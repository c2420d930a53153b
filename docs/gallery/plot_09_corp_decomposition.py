"""
Is a bad score due to calibration or to discrimination?
=======================================================

The CORP decomposition divides a score into three parts: miscalibration, discrimination and uncertainty. CORP stands
for consistent, optimally binned, reproducible, and based on the pool-adjacent-violators algorithm.
"""

from sklearn.datasets import load_breast_cancer
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_predict
from sklearn.naive_bayes import GaussianNB
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import torchcalib

x, y = load_breast_cancer(return_X_y=True)
x = x[:, :10]  # the means of ten measurements
models = {
    "naive Bayes": GaussianNB(),
    "random forest": RandomForestClassifier(50, random_state=0),
    "logistic regression": make_pipeline(StandardScaler(), LogisticRegression()),
}
probs = {
    name: cross_val_predict(model, x, y, method="predict_proba")[:, 1]
    for name, model in models.items()
}
for name, p in probs.items():
    parts = torchcalib.functional.corp(p, y, task="binary", score="brier")
    print(
        f"{name:20} Brier score {parts.score:.4f} "
        f"= {parts.mcb:.4f} - {parts.dsc:.4f} + {parts.unc:.4f}"
    )

# %%
# The Brier score is the mean squared distance between the probability and the outcome. The parts are:
#
# - Miscalibration: the improvement by the best monotone recalibration. Smaller is better.
# - Discrimination: the advantage of the recalibrated model over a constant prediction. Larger is better.
# - Uncertainty: the score of the constant prediction, which depends only on the outcomes.
#
# Recalibration reduces the first part. A larger second part requires a better model.

torchcalib.plots.corp_diagram(probs["naive Bayes"], y, title="Gaussian naive Bayes").figure

# %%
# The diagram shows the recalibrated probability for each prediction, without a choice of bins. The band contains the
# curve of a calibrated model with probability 95% at each point.
#
# Naive Bayes assumes that the measurements are independent, but they are correlated. Its probabilities are therefore
# too extreme. Logistic regression does not have this problem.

torchcalib.plots.corp_diagram(
    probs["logistic regression"], y, title="Logistic regression"
).figure

# %%
# The method is from Dimitriadis, Gneiting and Jordan, `Stable reliability diagrams for probabilistic classifiers
# <https://doi.org/10.1073/pnas.2016191118>`_.
