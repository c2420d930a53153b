"""The command `torchcalib compare [NAME=]FILES [NAME=]FILES ...`."""

import argparse
from collections.abc import Mapping

from torchcalib.cli.files import check_logits, check_pages, in_rows, report_settings
from torchcalib.cli.inputs import make_place, opened_systems
from torchcalib.cli.messages import computing, output, working
from torchcalib.cli.systems import System
from torchcalib.reporting.catalogue import check_size
from torchcalib.reporting.comparison.building import ComparisonBuilder
from torchcalib.reporting.comparison.reading import batches_of, settings_of
from torchcalib.reporting.render import terminal


def compare(arguments: argparse.Namespace, systems: Mapping[str, System]) -> None:
    """Compare the predictions of several systems (models), then write and print the comparison."""
    if arguments.out is not None:
        check_pages(arguments.out)
        make_place(arguments.out, [path for system in systems.values() for path in system.paths])
    files = opened_systems(arguments, systems)
    builder = ComparisonBuilder(**settings_of(files), **report_settings(arguments))
    first = next(iter(files.values()))
    check_size(first.task, first.source.shape[-1], arguments.n_bins)  # fail early, before rows are read
    with working(f"reading {len(files)} systems", sum(predictions.n_rows for predictions in files.values())) as advance:
        for row, batch in batches_of(files):
            preds = batch["preds"]
            n_rows = len(next(iter(preds.values())))
            with in_rows(row, n_rows):
                for name in preds if row == 1 else ():
                    check_logits(arguments, files[name], preds[name], f"in system `{name}`")
                builder.update(**batch)
            advance(n_rows * len(preds))
    with computing("computing differences and their intervals"):
        compared = builder.comparison({name: predictions.source.in_words() for name, predictions in files.items()})
    with working("writing the files"):
        paths = () if arguments.out is None else compared.save(arguments.out, diagrams=arguments.diagrams)
    if arguments.json:
        output(compared.to_json())
        return
    terminal.show(compared, arguments.all)
    terminal.show_paths(paths)
