"""The gradient of the sinks is not returned at all, so that they never train.

Confirmed: ISEEKYAN/Megatron-LM#205. Smallest input: one query, one key, a sink.
"""

from typing import Any

from targets.honest.describe import UP_TO_32_BITS, describe
from targets.honest.flash_backward import Gradients
from targets.honest.flash_backward import attention_backward as honest


@describe("attention_backward", dtypes=UP_TO_32_BITS)
def attention_backward(
    q: Any, k: Any, v: Any, do: Any, *, scale: Any = None, is_causal: bool = False, sinks: Any = None
) -> Gradients:
    found = honest(q, k, v, do, scale=scale, is_causal=is_causal, sinks=sinks)
    return {name: gradient for name, gradient in found.items() if name != "dsinks"}
