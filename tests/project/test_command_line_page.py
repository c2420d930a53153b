"""The page on the command line documents every command."""

import re

from processes import ROOT

from torchcalib.cli.parser import make_parser


def test_every_command_has_a_section_with_its_generated_options():
    text = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
    commands = set(make_parser().commands)
    assert set(re.findall(r"^```\{cli-options\} (\w+)$", text, flags=re.MULTILINE)) == commands
    assert set(re.findall(r"^## torchcalib (\w+)$", text, flags=re.MULTILINE)) == commands
