"""State what a function's signature cannot say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def declare(function: Callable[..., Any], metadata: Mapping[str, Any]) -> None:
    """Give ``function`` its metadata, ``__attn_oracle__``, as a plug-in sets it by hand."""
    function.__dict__["__attn_oracle__"] = dict(metadata)
