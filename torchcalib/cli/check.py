"""The command `torchcalib check FILE ... --fail-if CONDITION`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from torchcalib.cli.files import print_json, read_builder
from torchcalib.cli.messages import computing, output
from torchcalib.display.words import ONE_LOOK, printable, significant
from torchcalib.results.conditions import Condition


def check(arguments: argparse.Namespace, paths: Sequence[Path]) -> int:
    """Compute a report, print whether the condition of failure holds, and return the exit code."""
    condition: Condition = arguments.condition
    builder = read_builder(arguments, paths, with_calibration=False, with_intervals=condition.needs_intervals)
    with computing("computing values"):
        report = builder.report()
    outcome = condition.outcome(report)
    required, detectable = arguments.require_detectable, report.minimum_detectable_error
    has_few = required is not None and not detectable <= required
    failed = outcome.holds or has_few
    if arguments.json:
        found = {"passed": not failed, "fail_if": condition.text, "values": outcome.values}
        found |= {} if required is None else {"require_detectable": required, "minimum_detectable_error": detectable}
        print_json({**found, "sentence": report.sentence, "kind": report.decision.kind, "input": report.input_line})
    else:
        verdict = "FAILED" if failed else "passed"
        lines = [f"{verdict}: fail if {condition.text}", f"with {outcome}", report.sentence, report.input_line]
        if required is not None:
            rule = "too few rows" if has_few else "enough rows"
            lines[2:2] = [f"{rule}: mean errors of {significant(detectable)} are found, {required:g} is required"]
        lines += [ONE_LOOK] * any(term.function == "p" for term in condition.terms)
        output("\n".join(map(printable, lines)))
    return int(failed)
