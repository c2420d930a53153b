"""
How do I evaluate a language model on multiple-choice questions?
================================================================

A language model answers multiple-choice questions. The questions have two to five options. The scores of the options
are padded with :math:`-\\infty`, so a missing option has the probability 0.
"""

import torch

import torchcalib

generator = torch.Generator().manual_seed(0)
n = 4_000
n_options = torch.randint(2, 6, (n,), generator=generator)
true = 1.5 * torch.randn(n, 5, generator=generator)
true = true.masked_fill(torch.arange(5) >= n_options[:, None], -torch.inf)
answer = torch.multinomial(true.softmax(-1), 1, generator=generator).squeeze(-1)
scores = 2 * true  # summed log-probabilities of each option: more certain than correct
options = {"task": "multiclass", "from_logits": True}
print(scores[:3])

ece = torchcalib.functional.ece(scores, answer, **options)
accuracy = torchcalib.functional.accuracy(scores, answer, **options)
print(f"accuracy {accuracy:.1%}, ECE {ece:.3f}")
torchcalib.plots.reliability_diagram(scores, answer, from_logits=True).figure

# %%
# The marks are below the diagonal: the chosen answers are correct less often than their probability. The expected
# calibration error (ECE) is the mean distance.
#
# Questions with more options are more difficult. `ByGroup` shows whether their answers are less calibrated too.

metric = torchcalib.ByGroup(torchcalib.ECE(num_classes=5, from_logits=True), num_groups=6)
metric.update(scores, answer, groups=n_options)
metric.worst()

# %%
# The groups are the numbers of options. With `TopK(2)`, the event is that the correct answer is among the two most
# probable options.

for k in (1, 2, 3):
    error = torchcalib.functional.ece(scores, answer, mode=torchcalib.TopK(k), **options)
    print(f"ECE of the {k} most probable options: {error:.3f}")

# %%
# Temperature scaling accepts padded options, and they keep the probability 0.

scaling = torchcalib.calibration.TemperatureScaling()
calibrated = torchcalib.calibration.cross_val_calibrate(
    scores, answer, calibrator=scaling, **options
)
error = torchcalib.functional.ece(calibrated, answer, **options)
print(f"ECE after temperature scaling: {error:.3f}")

# %%
# Some systems only report a confidence and whether the answer was correct. This is a binary task. On files, the command
# `torchcalib report answers.jsonl` recognises the columns `confidence` and `correct`.

confidence, chosen = scores.softmax(-1).max(-1)
correct = (chosen == answer).long()
error = torchcalib.functional.ece(confidence, correct, task="binary")
auroc = torchcalib.functional.correctness_auroc(scores, answer, **options)
print(f"ECE from confidences: {error:.3f}")
print(f"probability that a correct answer is more confident: {auroc:.3f}")
