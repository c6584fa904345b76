"""The ops once more, in float64 loops written from their definitions: shares nothing with the kernels under
test.

Each function takes the target's own keyword arguments and returns one `Exact` per output.
"""

from collections.abc import Callable, Mapping

from meta_tests.kernels.plain.attention import attention, attention_backward, attention_paged, attention_varlen
from meta_tests.kernels.plain.blocks import gqa_block, mla_block
from meta_tests.kernels.plain.exact import Exact
from meta_tests.kernels.plain.latent import mla, mla_backward
from meta_tests.kernels.plain.rope import rope, rope_apply, rope_backward
from meta_tests.kernels.plain.softmax import log_softmax, logsumexp, softmax, softmax_backward

REFERENCES: Mapping[str, Callable[..., list[Exact]]] = {
    "attention": attention,
    "attention_varlen": attention_varlen,
    "attention_paged": attention_paged,
    "attention_backward": attention_backward,
    "mla": mla,
    "mla_backward": mla_backward,
    "rope": rope,
    "rope_backward": rope_backward,
    "rope_apply": rope_apply,
    "gqa_block": gqa_block,
    "mla_block": mla_block,
    "logsumexp": logsumexp,
    "log_softmax": log_softmax,
    "softmax_backward": softmax_backward,
    "softmax": softmax,
}
