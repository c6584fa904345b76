"""State what a function's signature cannot say."""

from __future__ import annotations

from collections.abc import Callable, Mapping


def declare(function: Callable[..., object], metadata: Mapping[str, object]) -> None:
    """Give ``function`` its metadata, ``__attn_oracle__``, as a plug-in sets it by hand."""
    function.__dict__["__attn_oracle__"] = dict(metadata)
