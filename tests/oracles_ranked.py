"""Slow, obvious oracles of bins of the sorted sample: lists of blocks, and means as fractions.

A sample is a list of (score, outcome) rows with whole-number weights; a block is a list of indices into it. Nothing
here shares code with the package.
"""

from fractions import Fraction


def groups(scores, outcomes, weights=None, ties="pool"):
    """The sample in ascending order: a list of groups of equal score ("pool"), or of single samples ("split")."""
    weights = weights or [1] * len(scores)
    out = []
    for i in sorted(range(len(scores)), key=lambda i: scores[i]):
        if weights[i] == 0:
            continue
        if ties == "pool" and out and scores[out[-1][0]] == scores[i]:
            out[-1].append(i)
        else:
            out.append([i])
    return out


class Sample:
    """Sizes and means of blocks of one sample."""

    def __init__(self, outcomes, weights=None):
        self.y = outcomes
        self.w = weights or [1] * len(outcomes)

    def size(self, block):
        return sum(self.w[i] for i in block)

    def positives(self, block):
        return sum(self.w[i] * self.y[i] for i in block)

    def mean(self, block):
        return Fraction(self.positives(block), self.size(block))

    def table(self, blocks):
        return [self.size(b) for b in blocks], [self.positives(b) for b in blocks]


def pava(sample, parts):
    """Isotonic least squares, the textbook way: look for two neighbours whose means do not rise, merge, start again."""
    blocks = [list(part) for part in parts]
    i = 0
    while i + 1 < len(blocks):
        if sample.mean(blocks[i]) >= sample.mean(blocks[i + 1]):
            blocks[i : i + 2] = [blocks[i] + blocks[i + 1]]
            i = 0
        else:
            i += 1
    return blocks


def pava_bc(sample, parts, n_min, n_max, variant):
    """[TCE] Algorithm 2 and 3, line by line over parts (samples, or groups of equal score)."""
    # The last n_min samples; a group is taken whole.
    tail, rest = [], list(parts)
    while sample.size(tail) < n_min:
        tail = rest.pop() + tail

    def joins(earlier, later):
        size = sample.size(earlier) + sample.size(later)
        return size <= n_min or (size <= n_max and sample.mean(earlier) >= sample.mean(later))

    blocks = []
    for part in rest:
        blocks.append(list(part))
        while len(blocks) > 1 and joins(blocks[-2], blocks[-1]):
            later = blocks.pop()
            blocks[-1] = blocks[-1] + later

    counted = n_min if variant == "code" else sample.size(blocks[-1]) if blocks else 0
    if blocks and counted + sample.size(tail) <= n_max:
        blocks[-1] = blocks[-1] + tail
    else:
        blocks.append(tail)

    if variant == "paper":
        merged = [blocks[0]]
        for block in blocks[1:]:
            if sample.mean(merged[-1]) == sample.mean(block):
                merged[-1] = merged[-1] + block
            else:
                merged.append(block)
        blocks = merged
    return blocks


def equal_mass(sample, parts, n_bins):
    """Cuts at i * N // B of the sorted samples; a part belongs to the bin in which its first sample falls."""
    total = sum(sample.size(part) for part in parts)
    blocks = [[] for _ in range(n_bins)]
    start = 0
    for part in parts:
        last_cut_before = max(i for i in range(n_bins) if i * total // n_bins <= start)
        blocks[last_cut_before] += part
        start += sample.size(part)
    return blocks


def weighted_isotonic(y, w):
    """Real targets: pool adjacent violators one pair at a time, then the weighted mean of every block."""
    blocks = [[i] for i in range(len(y))]

    def mean(block):
        return sum(w[i] * y[i] for i in block) / sum(w[i] for i in block)

    i = 0
    while i + 1 < len(blocks):
        if mean(blocks[i]) >= mean(blocks[i + 1]):
            blocks[i : i + 2] = [blocks[i] + blocks[i + 1]]
            i = max(i - 1, 0)
        else:
            i += 1
    return [mean(block) for block in blocks for _ in block]
