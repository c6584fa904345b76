"""cos and sin are stored in the input dtype, which the contract does not declare.

Confirmed, for a whole table built in 16 bits: EleutherAI/gpt-neox#1003. Reported:
Dao-AILab/flash-attention#823.
Smallest input: two entries, position 1.
"""

from targets.honest import rope as honest
from targets.honest.rope_variants import stored_table

rope = honest.kernel(honest.Steps(table=stored_table), dtypes=("fp16", "bf16"))
