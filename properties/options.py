"""The options of a verification, one row each: what the command line and the pytest plugin offer, what the one hands to
the other, and what belongs into the command that repeats a check are derived from this table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from properties.subject import PROFILES


@dataclass(frozen=True, slots=True)
class Option:
    """One row.

    flag: on the command line; short: another spelling of it. suite: its flag in pytest where that differs, None where
    it never gets there; native: pytest has it itself. repeatable: takes a list. switch: takes no value. rerun: decides
    how a target is called and judged, so that a command that repeats a check must say it, unless it is the default.
    """

    flag: str
    help: str
    short: str = ""
    suite: str | None = ""
    native: bool = False
    default: object = None
    type: Callable[[str], object] | None = None
    choices: tuple[str, ...] = ()
    metavar: str = ""
    repeatable: bool = False
    switch: bool = False
    rerun: bool = False

    @property
    def dest(self) -> str:
        """The name of its value among parsed ones, of the command and of pytest alike."""
        return (self.suite or self.flag).lstrip("-").replace("-", "_")

    def keywords(self) -> dict[str, object]:
        """What argparse's ``add_argument`` and pytest's ``addoption`` are told."""
        told: dict[str, object] = {"dest": self.dest, "help": self.help}
        if self.switch:
            return {**told, "action": "store_true"}
        told |= {"action": "append", "default": []} if self.repeatable else {"default": self.default}
        optional = {"type": self.type, "choices": self.choices, "metavar": self.metavar}
        return told | {name: value for name, value in optional.items() if value}

    def said(self, value: Any) -> list[str]:
        """``value`` as a command line says it: one word an item, an empty one for a switch; nothing for the default."""
        if self.switch:
            return [""] if value else []
        held = value if self.repeatable else [value] if value != self.default else []
        return [f"{item:g}" if isinstance(item, float) else str(item) for item in held]


_WHAT = "built-in name, file.py:function or package.module:attr"
OPTIONS = (
    Option("--target", f"{_WHAT}; repeatable (none: all built-in)", metavar="TARGET", repeatable=True),
    Option("--op", "op of a target whose parameters do not say", rerun=True),
    Option(
        "--dtype",
        "fp64, fp32, fp16, bf16, e4m3 or e5m2; repeatable (default: the target's)",
        repeatable=True,
    ),
    Option("--device", "cpu, cuda or cuda:N", default="cpu"),
    Option("--contract", "hold the targets to this preset", rerun=True),
    Option("--convention", "state a convention; repeatable", metavar="NAME=VALUE", repeatable=True, rerun=True),
    Option("--profile", "how much to try", default="default", choices=tuple(sorted(PROFILES))),
    Option("--seed", "seed of every search", default=0, type=int),
    Option("--property", "only this one; repeatable", metavar="ID", repeatable=True),
    Option(
        "--only", "only this property of a target in a dtype; repeatable", metavar="TARGET-DTYPE-ID", repeatable=True
    ),
    Option(
        "--last-failed",
        "ask again only what failed in the run that the folder of records holds",
        suite=None,
        switch=True,
    ),
    Option("--exitfirst", "stop at the first failure", short="-x", native=True, switch=True),
    Option("--case", "examine this saved case only", type=Path),
    Option(
        "--timeout",
        "seconds that one call of a target may take (60)",
        # pytest-timeout has an option of that name.
        suite="--call-seconds",
        default=60.0,
        type=float,
        metavar="S",
        rerun=True,
    ),
    Option(
        "--out",
        "folder of records and report (out; with --case: replay, beside the case's folder)",
        suite="--records",
        type=Path,
    ),
    Option(
        "--store",
        "folder that keeps enclosures and judgements between runs (attn-oracle in the user's cache)",
        type=Path,
        metavar="DIR",
    ),
    Option("--no-store", "compute everything anew", switch=True),
    Option("--json", "also write all records to FILE as one JSON document", suite=None, type=Path, metavar="FILE"),
    Option(
        "--workers",
        "worker processes (one a core); 0: none, and a target that dies takes all with it",
        suite=None,
        type=int,
    ),
)


def add_to(add: Callable[..., object], *, suite: bool = False) -> None:
    """Offer every option through ``add``: argparse's ``add_argument``, or pytest's ``addoption`` for the ``suite``."""
    for row in OPTIONS:
        if not suite:
            add(*filter(None, (row.short, row.flag)), **row.keywords())
        elif row.suite is not None and not row.native:
            add(row.suite or row.flag, **row.keywords())


def forwarded(values: Mapping[str, object]) -> list[str]:
    """The words that hand the command's parsed ``values`` (by `Option.dest`) to the plugin."""
    return [
        f"{row.suite or row.flag}={said}" if said else (row.suite or row.flag)
        for row in OPTIONS
        if row.suite is not None
        for said in row.said(values[row.dest])
    ]


def rerun_words(values: Mapping[str, object]) -> tuple[str, ...]:
    """The words of a rerun command that repeat what decided how a target was called and judged."""
    return tuple(
        word for row in OPTIONS if row.rerun for said in row.said(values[row.dest]) for word in (row.flag, said)
    )
