"""Every op's table of counterfactuals, for the one engine (`properties.diagnosis.engine`)."""

from __future__ import annotations

from properties.diagnosis.counterfactual import Table
from properties.ops.attention import diagnosis as attention
from properties.ops.blocks import diagnosis as blocks
from properties.ops.gradients import diagnosis as gradients
from properties.ops.gradients import softmax_diagnosis as softmax_backward
from properties.ops.layouts import diagnosis as layouts
from properties.ops.mla import diagnosis as mla
from properties.ops.rope import diagnosis as rope
from properties.ops.softmax import diagnosis as softmax

TABLES: dict[str, Table] = {
    op: table
    for module in (softmax, rope, attention, mla, softmax_backward, gradients, blocks, layouts)
    for op, table in module.TABLES.items()
}
