"""
Tables of the papers, reproduced
================================

The metrics of torchcalib come from papers. This page recomputes the numbers of three of them.

- **ECD**: Sumler, Devlin, Maskell, Lane: An Entropic Metric for Measuring Calibration of Machine Learning Models.
- **TCE**: Matsubara, Tax, Mudd, Guy: TCE: A Test-Based Approach to Measuring Calibration Error (UAI 2023,
  `arXiv:2306.14343 <https://arxiv.org/abs/2306.14343>`_).
- **EPSR**: Ferrer, Ramos: Evaluating Posterior Probabilities: Decision Theory, Proper Scoring Rules, and Calibration
  (TMLR, `arXiv:2408.02841 <https://arxiv.org/abs/2408.02841>`_).

Three tables are recomputed when this page is built.
The other tables take longer or need predictions of real systems, and were recorded by `python -m benchmarks.tables`.
"""

import matplotlib.pyplot as plt
import pandas as pd

from benchmarks import tables

date, cells = tables.saved()
NOW = ("tce-1", "tce-2", "epsr-1")
for name in NOW:
    cells[name] = list(tables.TABLES[name]())
# sphinx_gallery_start_ignore
compared = {name: [cell for cell in table if cell.agrees is not None] for name, table in cells.items()}


def agreement():
    """Return the numbers of compared and agreeing values."""
    rows = []
    for name, table in compared.items():
        if not table:  # numbers for other data
            continue
        row = {"table": tables.TITLES[name], "computed": "now" if name in NOW else date}
        for column, is_recorded in (("printed numbers that agree", False), ("reference numbers that agree", True)):
            agrees = [cell.agrees for cell in table if cell.recorded == is_recorded]
            row[column] = f"{sum(agrees)} of {len(agrees)}" if agrees else ""
        rows.append(row)
    pd.set_option("display.max_colwidth", None)
    return pd.DataFrame(rows).set_index("table").rename_axis(None)


def scatter():
    """Published and recomputed numbers."""
    _, axes = plt.subplots(2, 2, figsize=(7.5, 7), layout="constrained")
    for ax, name in zip(axes.flat, ("ecd-1", "epsr-curves", "epsr-scores", "epsr-systems"), strict=True):
        for is_recorded, color, label in ((False, "C0", "printed"), (True, "C1", "reference")):
            some = [cell for cell in compared[name] if cell.recorded == is_recorded and cell.column != "n"]
            ax.plot([float(c.published) for c in some], [c.value for c in some], ".", color=color, label=label)
        ax.axline((0, 0), slope=1, color="0.6", linewidth=0.8, zorder=0)
        title, _, description = tables.TITLES[name].partition(": ")
        ax.set_title(f"{title}\n{description}", fontsize=10)
        ax.set(xlabel="paper", ylabel="torchcalib")
        ax.legend(frameon=False)


def show(name, transposed=False):
    """Return a table whose cells have the recomputed and the printed number."""

    def text(cell):
        decimals = 1 + len(cell.published.partition(".")[2])  # one more than printed
        return f"{cell.value:z.{decimals}f} / {cell.published}"

    table = pd.DataFrame(
        [(cell.row, cell.column, text(cell)) for cell in compared[name]],
        columns=["row", "column", "text"],
    )
    cells_of = table.pivot(index="row", columns="column", values="text").rename_axis(index=None, columns=None)
    cells_of = cells_of.loc[table["row"].unique(), table["column"].unique()]
    return cells_of.T if transposed else cells_of


# sphinx_gallery_end_ignore

# %%
# Agreement
# ---------
#
# A recomputed number agrees if it rounds to the published one.
# Some results are only figures in the papers.
# They are compared with "reference" numbers, from the code of the authors or from NumPy loops.

agreement()

# %%
# Two printed numbers of the ECD paper differ. Its expected calibration error (ECE) does not follow from its text.
# With data as described in the text, the NumPy loop and torchcalib give the same smaller values.
#
# The figure shows all numbers that are not in the tables below the figure.

scatter()

# %%
# Test-based calibration error (TCE)
# ----------------------------------
#
# Each cell has the recomputed and the printed number.
# TCE(Q) and MCE(Q) use bins of equal numbers of samples. TCE is in percent.
# ACE and MCE are the adaptive and the maximum calibration error.
#
# Table 1: the estimation error of bins, as the total error and the mean error within bins. The satimage data of the
# paper are not available. The same random forest is fitted to simulated data of that size.
# The numbers are not comparable. The setting of the simulation was chosen to show the order of the bins in the paper,
# and is no evidence for it.

pd.DataFrame(
    [(cell.row, cell.column, f"{cell.value:.4f}", cell.note) for cell in cells["tce-1"]],
    columns=["bins", "error", "simulated data", "paper"],
).set_index(["bins", "error"])

# %%
# Table 2: a logistic regression is fitted with one frequency of positives, and evaluated with another one.


show("tce-2")

# %%
# Table 5: dogs against other classes of ImageNet. Predictions are available for two of its five networks.

show("tce-5")

# %%
# Semi-empirical scores
# ---------------------
#
# EPSR, Table 1: the difference of the empirical and the semi-empirical normalised cross-entropy, in percent.
# "cal" is calibrated, "mcs" has scaled logits, "mcp" has wrong priors, and "mcps" has both, with 200 to 20,000 samples.
# References are the true posteriors, and affine ("aff"), temperature ("tem") and histogram ("his") calibration.
# They are fitted to the test data ("tt") or cross-validated ("xv").

show("epsr-1", transposed=True)
