"""Which properties belong to which op. Adding a table is adding a row."""

from __future__ import annotations

from properties.ops.attention.table import PROPERTIES as ATTENTION
from properties.ops.blocks.gqa import PROPERTIES as GQA_BLOCK
from properties.ops.blocks.mla import PROPERTIES as MLA_BLOCK
from properties.ops.gradients.attention import PROPERTIES as ATTENTION_BACKWARD
from properties.ops.gradients.mla import PROPERTIES as MLA_BACKWARD
from properties.ops.gradients.softmax import PROPERTIES as SOFTMAX_BACKWARD
from properties.ops.layouts.table import PAGED_PROPERTIES, VARLEN_PROPERTIES
from properties.ops.mla.table import PROPERTIES as MLA
from properties.ops.rope.table import APPLY_PROPERTIES, BACKWARD_PROPERTIES
from properties.ops.rope.table import PROPERTIES as ROPE
from properties.ops.softmax.table import PROPERTIES as SOFTMAX
from properties.property import Property

_TABLES: dict[str, tuple[Property, ...]] = {
    "attention": ATTENTION,
    "attention_backward": ATTENTION_BACKWARD,
    "attention_varlen": VARLEN_PROPERTIES,
    "attention_paged": PAGED_PROPERTIES,
    "mla": MLA,
    "mla_backward": MLA_BACKWARD,
    "mla_block": MLA_BLOCK,
    "gqa_block": GQA_BLOCK,
    "rope": ROPE,
    "rope_backward": BACKWARD_PROPERTIES,
    "rope_apply": APPLY_PROPERTIES,
    "softmax": SOFTMAX,
    "log_softmax": SOFTMAX,
    "logsumexp": SOFTMAX,
    "softmax_backward": SOFTMAX_BACKWARD,
}


def properties_for(op: str) -> tuple[Property, ...]:
    """The rows of one op, in catalogue order; none for an op without a table."""
    return _TABLES.get(op, ())
