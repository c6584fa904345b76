"""Conventions that a target does not declare are probed once on tiny cases, then frozen and printed as its datasheet.

The probes stand with the targets (`targets.probes`), where plug-in authors find them too; the valid names and values
stand in `targets.conventions`.
"""

from __future__ import annotations

from targets.probes import PROBES, probe

__all__ = ["PROBES", "probe"]
