"""The metadata of the honest kernels and of the mutants made from them: `fn.__attn_oracle__`."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from oracle.ops.attention.row import NAN_BEHIND

ALL = ("fp64", "fp32", "fp16", "bf16")
UP_TO_32_BITS = ("fp32", "fp16", "bf16")

_LAYOUT = {
    "causal_alignment": "bottom_right",
    "lse_base": "e",
    "empty_row": "zero",
    "empty_row_lse": "-inf",
    "window_left": "included",
    "softcap_order": "before_mask",
    "alibi_bias": "distance",
    "lse_sink": "included",
}
CONVENTIONS: Mapping[str, Mapping[str, str]] = {
    "attention": {**_LAYOUT, **dict.fromkeys(NAN_BEHIND, "blocked")},
    "attention_varlen": _LAYOUT,
    "attention_paged": _LAYOUT,
    "mla": {
        "causal_alignment": "bottom_right",
        "lse_base": "e",
        "empty_row": "zero",
        "empty_row_lse": "-inf",
        "masked_nan": "blocked",
    },
    "mla_backward": {"causal_alignment": "bottom_right"},
    "softmax": {"empty_row": "zero"},
    "logsumexp": {"lse_base": "e", "empty_row_lse": "-inf"},
}

CONVENTIONS = {**CONVENTIONS, "attention_backward": CONVENTIONS["attention"]}

Function = TypeVar("Function", bound=Callable[..., object])


def describe(
    op: str,
    *,
    dtypes: tuple[str, ...] = UP_TO_32_BITS,
    contract: str | Mapping[str, object] | None = None,
    conventions: Mapping[str, str] | None = None,
) -> Callable[[Function], Function]:
    """Attach what a target declares; `conventions` overrides the honest ones of its op one by one.

    Without a contract the target is held to the default of each input dtype.
    """

    def attach(function: Function) -> Function:
        described: dict[str, object] = {
            "op": op,
            "dtypes": dtypes,
            "devices": ("cpu",),
            "framework": "torch",
            "conventions": {**CONVENTIONS.get(op, {}), **(conventions or {})},
        }
        if contract is not None:
            described["contract"] = contract
        setattr(function, "__attn_oracle__", described)  # noqa: B010 - mypy knows no attributes of functions
        return function

    return attach
