"""What was made last of a case, so that its blocks, and what bounds them, need not make it again.

A gradient has blocks for queries and for keys, and each reads the whole pass of its heads. Results are kept by the
identity of the case, which is held as long as they are; the oldest go when there are too many numbers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from oracle.case import Case


@dataclass(slots=True)
class Recent:
    """``limit``: how many numbers may be kept, as the callers count them."""

    limit: int
    _held: OrderedDict[Hashable, tuple[Case, int, object]] = field(default_factory=OrderedDict)
    _total: int = 0

    def of(self, case: Case, what: Hashable, size: int, make: Callable[[], Any]) -> Any:
        """``make()``, which has ``size`` numbers and is a function of the case and of ``what``."""
        key = (id(case), what)
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key][2]
        made = make()
        if size <= self.limit:
            self._held[key] = (case, size, made)
            self._total += size
        while self._total > self.limit:
            self._total -= self._held.popitem(last=False)[1][1]
        return made
