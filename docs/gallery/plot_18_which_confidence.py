"""
Which confidence of a language model?
=====================================

An answer of a language model has several confidences. This example writes a log of 400 questions with four options, in
the form of lm-eval, and evaluates six definitions on the same answers.

The log is simulated. The model scores every option by the sum of the log-probabilities of its tokens, which favours
short options.
"""

import json
import math
import random
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

import torchcalib

rng = random.Random(0)
options = ["no", "perhaps not", "almost certainly", "in the year 1997, and never before"]
folder = tempfile.TemporaryDirectory()
path = Path(folder.name, "samples_questions.jsonl")
with path.open("w") as file:
    for doc_id in range(400):
        true = [rng.gauss(0, 2) for _ in options]
        right = rng.choices(range(4), [math.exp(score) for score in true])[0]
        scores = [
            1.5 * score - 0.05 * len(option)
            for score, option in zip(true, options, strict=True)
        ]
        row = {
            "doc_id": doc_id,
            "target": str(right),
            "arguments": {
                f"gen_args_{k}": {"arg_0": "Since when?", "arg_1": f" {text}"}
                for k, text in enumerate(options)
            },
            "resps": [[[str(min(score - 5, 0)), "False"]] for score in scores],
            "filter": "none",
        }
        file.write(json.dumps(row) + "\n")

found = torchcalib.audit(path, with_calibration=False)
folder.cleanup()
print(found.to_markdown())

# %%
# Confidences are normalised over the options (choices), after division by the number of characters, or of bytes. The
# event is that the chosen option is right, or, for all options of all questions, that an option is right. Accuracy and
# calibration error depend on the definition: dividing by the length makes the probabilities nearly uniform.

figure, axes = plt.subplots(1, 3, figsize=(12, 4.5), layout="constrained")
for ax, key in zip(axes, ("choices", "choices_per_character", "choices/each"), strict=True):
    torchcalib.plots.reliability_diagram(found[key].report, ax=ax)
    ax.set_title(key)

# %%
# The definition card has everything that a publication must state beside the number:

for item, words in found["choices"].card(found.n_answers).items():
    print(f"{item}: {words}")

# %%
# The same as a sentence:

print(found.sentence)
