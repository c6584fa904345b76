"""log2(e) is 1.442: in a 16-bit output invisible, in the LSE plain.

The contract promises a row sum of unrounded P: else an LSE may be off by the roundings of P.
Smallest input: one key with score 8.
"""

from targets.honest.flash import kernel
from targets.honest.flash_variants import in_base_two

attention = kernel(in_base_two(1.442), contract={"row_sum": "unrounded"})
