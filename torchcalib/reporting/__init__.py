"""Everything that is known about a set of predictions, as data: `report(preds, target, task=...)` gives a `Report`.

A report is built from sums and from samples in order, so `ReportBuilder` takes predictions piece by piece, of any
number, in bounded memory. Builders add: what one of them holds is saved to a file, or sent to another rank, and merged.
Drawing, pages and files are made further up, from the finished `Report`.
"""
