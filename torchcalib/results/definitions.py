"""Definition cards: what the number of a line of a report is computed from, and how."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchcalib.display.tables import Cell, Column, Table
from torchcalib.display.words import count
from torchcalib.results.lines import Line, by_group, name_column


@dataclass(frozen=True, kw_only=True)
class Definition:
    """Definition of a number in a report. None stands for a choice that the metric does not have.

    Attributes:
        confidence: source of the confidences: `"probabilities"`, `"softmax of logits"`, `"sigmoid of logits"` or
            `"stated"`.
        event: event whose probability is the confidence, such as `"top label"`.
        average: `"classes"` or `"labels"` if the number is a mean over them.
        normalisation: divisor of the number, such as `"value for the class frequencies"`.
        bins: rule of the bins: `"equal_width"`, `"equal_mass"`, `"pava"` (isotonic blocks) or `"pava_bc"` (isotonic
            blocks of bounded size).
        n_bins: number of bins; None if it follows from the data.
        edges: bin to which an edge belongs: `"[a, b), last bin closed"` or `"(a, b], first bin closed"`.
        ties: `"pool"` if samples with equal confidence have no order; None if the order of samples has no effect.
        norm: norm over bins, or over samples for KS: `"l1"`, `"l2"` or `"max"`; `"mean"` for a signed mean.
        debiased: whether the sampling noise of bins is subtracted.
        sample: for metrics of the order of the confidences, `"exact"` or the resolution of the sketch.
        n: sum of weights over the samples; multi-label: over the labelled entries.
        clusters: number of clusters of dependent rows; None if rows are independent.
        n_dropped: number of samples (multi-label: entries) excluded by `nan_policy="drop"`.
        ignore_index: target of further excluded rows.
    """

    confidence: str
    event: str
    average: str | None
    normalisation: str | None
    bins: str | None
    n_bins: int | None
    edges: str | None
    ties: str | None
    norm: str | None
    debiased: bool
    sample: str | None
    n: float
    clusters: int | None
    n_dropped: int
    ignore_index: int | None

    @property
    def of_input(self) -> str:
        """The choices that all lines of a report have in common, as sentences."""
        parts = [f"Confidences: {self.confidence}.", f"n = {count(self.n)}."]
        parts += [] if self.clusters is None else [f"Clusters of dependent rows: {count(self.clusters)}."]
        excluded = [f"{count(self.n_dropped)} for NaN"] * bool(self.n_dropped)
        excluded += [] if self.ignore_index is None else [f"rows with the target {self.ignore_index}"]
        return " ".join([*parts, f"Excluded: {' and '.join(excluded) or 'nothing'}."])

    @property
    def rule_of_bins(self) -> str:
        """Rule, number and edges of the bins, in words; empty without bins."""
        rule = (self.bins or "").replace("_", " ")
        return ", ".join(filter(None, (f"{self.n_bins} {rule}" if self.n_bins else rule, self.edges)))


def definition_table(lines: Sequence[Line], definitions: Mapping[str, Definition]) -> Table:
    """Return the table of the definitions of all lines, without those that all lines have in common."""

    def column(header: str, text: str) -> Column:
        return Column(header, lambda line: Cell(getattr(definitions[line.key], text) or ""), is_number=False)

    debiased = Column("debiased", lambda line: Cell("yes" * definitions[line.key].debiased), is_number=False)
    columns = [name_column(), column("event", "event"), column("mean over", "average"), column("bins", "rule_of_bins")]
    columns += [column("ties", "ties"), column("norm", "norm"), debiased, column("divided by", "normalisation")]
    return Table.from_items(columns, by_group(lines))
