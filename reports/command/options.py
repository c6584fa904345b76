"""The command line: its commands, and the options of each."""

from __future__ import annotations

import argparse
from pathlib import Path

from properties.options import add_to
from reports.run.compare import ONE_BIT

PROGRAM = "attn-oracle"
_WHICH = "built-in name, file.py:function or package.module:attr (none: all built-in)"


def parser() -> argparse.ArgumentParser:
    """Parses every command; the options of ``verify`` are rows of `properties.options`."""
    whole = argparse.ArgumentParser(
        prog=PROGRAM, description="Verify attention, softmax, RoPE and MLA kernels against proven enclosures."
    )
    commands = whole.add_subparsers(dest="command", required=True)
    verify = commands.add_parser("verify", help="run the property suite on targets and write records and a report")
    verify.add_argument("targets", nargs="*", metavar="TARGET", help=_WHICH)
    add_to(verify.add_argument)
    listing = commands.add_parser("targets", help="what there is, what each supports, what is missing and why")
    listing.add_argument("targets", nargs="*", metavar="TARGET", help="only these (none: built-in ones and plug-ins)")
    listing.add_argument("--op", help="op of a target whose parameters do not say")
    listing.add_argument("--json", action="store_true")
    listing.add_argument(
        "--check", action="store_true", help="call each once per dtype and compare with its statements"
    )
    report = commands.add_parser("report", help="write report.md and report.html from the records of DIR")
    report.add_argument("folder", type=Path, metavar="DIR")
    against = commands.add_parser("compare", help="two runs record by record; 1 if the new one is worse")
    against.add_argument("old", type=Path, metavar="OLD", help="folder of the run before")
    against.add_argument("new", type=Path, metavar="NEW", help="folder of the run after")
    say = "how much error/bound may grow in a record (2: one bit)"
    against.add_argument("--factor", type=float, default=ONE_BIT, metavar="F", help=say)
    against.add_argument("--exact", action="store_true", help="any difference of verdict, case or figures counts")
    against.add_argument("--common", action="store_true", help="only what both asked, as where one run chose targets")
    against.add_argument("--across-versions", action="store_true", help="libraries and Python may differ")
    against.add_argument("--json", type=Path, metavar="FILE", help="also write all that changed to FILE")
    return whole


def parsed(words: list[str]) -> argparse.Namespace:
    """The options that ``words`` give; those of ``verify`` with all its targets in ``target``."""
    options = parser().parse_args(words)
    if options.command == "verify":
        options.target = [*options.targets, *options.target]
    return options
