"""What failed in an earlier run, so that only that is asked again."""

from __future__ import annotations

import argparse
from pathlib import Path

from properties.judge.verdict import BAD, Verdict
from properties.waivers import waive
from reports.command.options import parsed
from reports.command.request import WrongUse
from reports.run.load import load


def ask_again(options: argparse.Namespace, folder: Path) -> None:
    """Narrow ``options`` to the failures that ``folder`` holds; its targets, if none is named. WrongUse without any."""
    if not list(folder.glob("records-*.jsonl")):
        raise WrongUse(f"--last-failed: {folder} holds no earlier run")
    run = load(folder)
    failed = [r for r in run.records if Verdict(r.verdict) in BAD and r.property != "contract" and waive(r) is None]
    if not failed:
        raise WrongUse(f"--last-failed: nothing failed in the run that {folder} holds")
    # A target that took no call at all is asked everything.
    dead = {(r.target, r.dtype) for r in failed if r.property == "probe"}
    labels = {f"{r.target}-{r.dtype}-" + ("" if (r.target, r.dtype) in dead else r.property) for r in failed}
    options.only = sorted(labels)
    if not options.target and run.environments:
        options.target = parsed([str(w) for w in run.environments[-1]["argv"]]).target
