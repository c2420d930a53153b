"""
Which confidence of a language model?
=====================================

An answer of a language model has several confidences. This example evaluates six definitions on the same answers of a
small language model: a mixture of character n-grams, trained on half of the reference manual that Python contains. It
chooses how the text of the other half continues.
"""

import json
import math
import random
import tempfile
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics

import matplotlib.pyplot as plt

import torchcalib

ORDER = 6  # characters that the model reads to predict the next one
texts = [" ".join(topics[name].split()) for name in sorted(topics)]
train, held_out = texts[::2], texts[1::2]
counts = Counter(
    text[at : at + n]
    for text in train
    for n in range(1, ORDER + 2)
    for at in range(len(text) - n + 1)
)
n_characters = sum(map(len, train))


def probability(character, context):
    """Mix the frequency after this context with the probability after a shorter one."""
    if not context:
        return (counts[character] + 1) / (n_characters + 256)
    shorter = probability(character, context[1:])
    return (counts[context + character] + 5 * shorter) / (counts[context] + 5)


def log_prob(option, context):
    text = context + option
    return sum(
        math.log(probability(text[at], text[at - ORDER : at]))
        for at in range(len(context), len(text))
    )


# %%
# Each of 600 questions has four options of one to six words. One of them follows in the text, and the others are from
# random places. The answers are written as lm-eval writes them: the log-probability of each option is the sum over its
# characters.

rng = random.Random(0)
pages = [text.split() for text in held_out if len(text) > 1_000]


def drawn_phrase():
    """Draw ten words and the one to six words that follow them."""
    words = rng.choice(pages)
    at = rng.randrange(10, len(words) - 6)
    return " ".join(words[at - 10 : at]), " " + " ".join(words[at : at + rng.randint(1, 6)])


folder = tempfile.TemporaryDirectory()
path = Path(folder.name, "samples_manual.jsonl")
with path.open("w") as file:
    for doc_id in range(600):
        context, following = drawn_phrase()
        options = [following, *(drawn_phrase()[1] for _ in range(3))]
        rng.shuffle(options)
        row = {
            "doc_id": doc_id,
            "target": str(options.index(following)),
            "arguments": {
                f"gen_args_{k}": {"arg_0": context, "arg_1": option}
                for k, option in enumerate(options)
            },
            "resps": [[[str(log_prob(option, context)), "False"]] for option in options],
            "filter": "none",
        }
        file.write(json.dumps(row) + "\n")

found = torchcalib.audit(path, with_calibration=False)
folder.cleanup()
print(found.to_markdown())

# %%
# Confidences are normalised over the options (choices), after division by the number of characters, or of bytes. The
# event is that the chosen option is right, or, for all options of all questions, that an option is right. Accuracy and
# calibration error depend on the definition: the sum of log-probabilities favours short options, and is far too
# certain. Divided by the length, the same log-probabilities give a higher accuracy and a much smaller error.

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
