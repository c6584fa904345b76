"""What implementations of attention may refuse without being wrong: shapes of heads, shapes and kinds of options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from oracle.formats import Format
from oracle.ops.op import Calls, Limit, Options, Sizes

# Of the tiny calls: two heads, two queries, three keys.
_TWO = {"heads": 2, "kv_heads": 2}
# What a mask differs along -> its shape in a tiny call.
_MASKS = {
    "mask_of_rows": ("masks [Sq, Sk]", (2, 3)),
    "mask_of_keys": ("masks [B, 1, 1, Sk]", (1, 1, 1, 3)),
    "mask_of_sequences": ("masks [B, 1, Sq, Sk]", (1, 1, 2, 3)),
    "mask_of_heads": ("masks [B, Hq, Sq, Sk]", (1, 2, 2, 3)),
}
_SHAPES = tuple(shape for _, shape in reversed(_MASKS.values()))


def mask_form(shape: tuple[int, ...], sizes: Sizes) -> str:
    """The limit that a mask of this shape falls under; nothing where sizes of 1 leave it open."""
    if len(shape) < 4:
        return "mask_of_rows"
    if shape[-2] == 1 < sizes["Sq"]:
        return "mask_of_keys"
    if sizes["Hq"] == 1:
        return ""
    return "mask_of_sequences" if shape[1] == 1 else "mask_of_heads"


def _has_form(name: str, sizes: Sizes, options: Options) -> bool:
    return mask_form(options["attn_mask"].shape, sizes) == name


def _masked(kinds: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> Calls:
    """Calls with masks that hide nothing, of each kind and shape."""

    def calls(width: int, wide: Format) -> list[dict[str, Any]]:
        masks = [(kind, shape) for kind in kinds for shape in shapes]
        return [
            {**_TWO, "attn_mask": np.ones(shape, dtype=bool) if kind == "boolean" else wide.store(np.zeros(shape))}
            for kind, shape in masks
        ]

    return calls


def _sloped(*shape: int) -> Calls:
    return lambda width, wide: [{**_TWO, "alibi_slopes": np.full(shape, 0.5, dtype=np.float32)}]


LIMITS: Mapping[str, Limit] = {
    # Asked with more than one KV head, which any code for equal heads would broadcast.
    "grouped_heads": Limit(
        "grouped KV heads",
        lambda sizes, options: sizes["Hq"] != sizes["Hkv"],
        lambda width, wide: [{"heads": 4, "kv_heads": 2}],
    ),
    "unequal_value_dim": Limit(
        "Dv != D", lambda sizes, options: sizes["D"] != sizes["Dv"], lambda width, wide: [{"value_dims": 2 * width}]
    ),
    "boolean_mask": Limit(
        "boolean masks",
        lambda sizes, options: options["attn_mask"].dtype == np.bool_,
        _masked(("boolean",), _SHAPES),
        "attn_mask",
    ),
    "additive_mask": Limit(
        "additive masks",
        lambda sizes, options: options["attn_mask"].dtype != np.bool_,
        _masked(("additive",), _SHAPES),
        "attn_mask",
    ),
    # A kind is refused where it has none of these forms, a form where masks of no kind may have it.
    **{
        name: Limit(said, partial(_has_form, name), _masked(("boolean", "additive"), (shape,)), "attn_mask")
        for name, (said, shape) in _MASKS.items()
    },
    "slopes_by_head": Limit(
        "slopes [Hq]", lambda sizes, options: options["alibi_slopes"].ndim == 1, _sloped(2), "alibi_slopes"
    ),
    "slopes_by_sequence": Limit(
        "slopes [B, Hq]", lambda sizes, options: options["alibi_slopes"].ndim == 2, _sloped(1, 2), "alibi_slopes"
    ),
}


def limits_of(options: Options) -> Mapping[str, Limit]:
    """Those of an op with these options."""
    return {name: limit for name, limit in LIMITS.items() if limit.option in ("", *options)}
