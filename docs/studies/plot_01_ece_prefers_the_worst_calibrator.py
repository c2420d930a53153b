"""
ECE prefers the worst calibrator
================================

The expected calibration error (ECE) can rank a poor calibrator first.
This page fits all calibrators of torchcalib to simulated systems.
It ranks them on held-out data by ECE, Brier score and log loss.
"""

import warnings

import matplotlib.pyplot as plt
import torch

import torchcalib.functional as F
from torchcalib.calibration.recommendation import CALIBRATORS

warnings.simplefilter("ignore")  # remarks of calibrators on small samples

SYSTEMS = {
    "log-odds times 2": lambda z, _: 2 * z,
    "log-odds times 0.5": lambda z, _: z / 2,
    "log-odds plus 1": lambda z, _: z + 1,
    "noisy log-odds": lambda z, g: z + torch.randn(z.shape, generator=g),
    "too extreme tails": lambda z, _: z + 0.15 * z**3,
    "bounded log-odds": lambda z, _: 3 * (z / 1.5).tanh(),
}
SCORES = {"ECE": F.ece, "Brier score": F.brier_score, "log loss": F.nll}
SEEDS, N_FIT, N_TEST = 4, 1_000, 2_000

methods = [method for method in CALIBRATORS if "binary" in method().tasks]
scores = {method().name: [] for method in methods}
for number, distorted in enumerate(SYSTEMS.values()):
    for seed in range(SEEDS):
        g = torch.Generator().manual_seed(100 * number + seed)
        true_log_odds = 2 * torch.randn(N_FIT + N_TEST, generator=g) - 0.5
        target = (torch.rand(true_log_odds.shape, generator=g) < true_log_odds.sigmoid()).long()
        logits = distorted(true_log_odds, g)
        for method in methods:
            calibrator = method().fit(logits[:N_FIT], target[:N_FIT], task="binary", from_logits=True)
            probs = calibrator.predict_proba(logits[N_FIT:])
            values = [score(probs, target[N_FIT:], task="binary").item() for score in SCORES.values()]
            scores[calibrator.name].append(values)

# %%
# Rank of each calibrator
# -----------------------
#
# The win rate of a calibrator is the fraction of the other calibrators with a larger value, where a tie counts half.
# It is averaged over systems and seeds. Rank 1 has the highest win rate.

names = list(scores)
table = torch.tensor([scores[name] for name in names])  # (calibrator, experiment, score)
smaller = (table.unsqueeze(1) < table).double() + (table.unsqueeze(1) == table) / 2
win_rate = (smaller.sum(1) - 0.5).mean(1) / (len(names) - 1)
rank = 1 + (-win_rate).argsort(0).argsort(0)

# sphinx_gallery_start_ignore
fig, ax = plt.subplots(figsize=(7.5, 5), layout="constrained")
for name, places in zip(names, rank, strict=True):
    histogram = name == "histogram binning"
    ax.plot(places, "o-", color="C3" if histogram else "0.6", linewidth=3 if histogram else 1.2, zorder=2 + histogram)
    ax.annotate(name, (2, places[2]), (10, 0), textcoords="offset points", va="center")
ax.set(xticks=range(3), xticklabels=SCORES, yticks=range(1, len(names) + 1), ylabel="rank", xlim=(-0.2, 3.6))
ax.invert_yaxis()
ax.spines[["top", "right"]].set_visible(False)
# sphinx_gallery_end_ignore

# %%
# The same in numbers:

ece, brier, log_loss = rank[names.index("histogram binning")].tolist()
print(f"Histogram binning has rank {ece} of {len(names)} by ECE, {brier} by Brier score and {log_loss} by log loss.")
print(f"\n{'win rate':30}" + "".join(f"{score:>13}" for score in SCORES))
for k in rank[:, 1].argsort().tolist():
    print(f"{names[k]:30}" + "".join(f"{rate:>13.1%}" for rate in win_rate[k].tolist()))

# %%
# Why this happens
# ----------------
#
# Histogram binning replaces all predictions of a bin by one frequency, so that it returns at most 15 values.
# The ECE compares means of the same kind of bins. It ignores differences within a bin.
# A proper score, such as Brier score or log loss, is the sum of a calibration error and a refinement loss.
# Replacing different predictions by one value increases the refinement loss, which the ECE does not contain.
#
# An extreme example is a model that predicts the class frequency for every sample:

probs = torch.full((N_TEST,), target[:N_FIT].double().mean())
for score, function in SCORES.items():
    constant = function(probs, target[N_FIT:], task="binary").item()
    system = function(logits[N_FIT:], target[N_FIT:], task="binary", from_logits=True).item()
    print(f"{score}: constant prediction {constant:.3f}, uncalibrated system {system:.3f}")

# %%
# By ECE, the constant prediction is better than the system. By both proper scores it is much worse.
#
# The low ranks of both isotonic methods by log loss have another cause.
# They can predict a probability of exactly 0 or 1. One wrong prediction of this kind has an infinite log loss.
#
# The same in a public benchmark
# ------------------------------
#
# CalArena (`arXiv:2605.30188 <https://arxiv.org/abs/2605.30188>`_) compares calibrators in 1,791 experiments.
# These win rates of binary tasks were computed from its published results, as means of three benchmarks.
# Histogram binning, with bins of equal numbers of samples, is second of 20 methods by ECE and last by Brier score.
#
# .. list-table::
#    :header-rows: 1
#
#    * - calibrator
#      - Brier score
#      - log loss
#      - ECE, 15 bins
#    * - quadratic scaling
#      - 0.714
#      - 0.708
#      - 0.517
#    * - beta calibration
#      - 0.694
#      - 0.719
#      - 0.535
#    * - temperature scaling
#      - 0.585
#      - 0.590
#      - 0.380
#    * - isotonic calibration
#      - 0.551
#      - 0.398
#      - 0.584
#    * - histogram binning
#      - 0.253
#      - 0.261
#      - 0.725
#
# Conclusion
# ----------
#
# Choose a calibrator by a proper score on held-out data, as :py:func:`torchcalib.calibration.recommend` does.
# Report the ECE beside it, with its noise floor.
