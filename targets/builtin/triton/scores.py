"""Attention scores inside Triton kernels: what happens to a tile of q k^T before its exponential.

    S = scale q k^T;  S = c tanh(S / c);  S = S - slope |i - j|;  S = S + bias;  hidden keys to -inf

with i the absolute position of a query, aligned at the bottom right: row + Sk - Sq. Forward, backward and the
oracle's definition share this order.
"""

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """tanh in float32 to 3 units of 2^-24, relative: near 0 an odd polynomial, beyond 1 by exp without overflow.

    The polynomial interpolates (tanh(x)/x - 1) / x^2 at Chebyshev nodes of x^2 in [0, 1], to 2e-9.
    """
    size = tl.abs(x)
    z = size * size
    p = z * 0.000142793186 - 0.000923500862
    p = p * z + 0.00320680346
    p = p * z - 0.00869784784
    p = p * z + 0.0218295492
    p = p * z - 0.0539634153
    p = p * z + 0.133333102
    p = p * z - 0.333333343
    near = size + size * z * p
    far = 1.0 - 2.0 / (tl.exp(2.0 * size) + 1.0)  # a NaN goes this way
    both = tl.where(size < 1.0, near, far)
    return tl.where(x < 0.0, -both, both)


@triton.jit
def score_tile(
    products, row, col, queries, keys, scale, softcap, left, right, slope, mask_at, mask_row, mask_col,
    BOUND_LEFT: tl.constexpr, BOUND_RIGHT: tl.constexpr, CAP: tl.constexpr, ALIBI: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """(S, tanh(S / c), visible) of a tile of products q k^T.

    `row` [R, 1] and `col` [1, C] (or turned around) index queries and keys of this sequence. A query at position
    i sees keys i - left to i + right. MASK: 0 none, 1 boolean, 2 added; `mask_at` points at row 0, key 0.
    """
    s = products * scale
    tamed = s
    if CAP:
        tamed = tanh(s / softcap)
        s = softcap * tamed
    position = row + (keys - queries)
    if ALIBI:
        s = s - slope * tl.abs(position - col).to(tl.float32)
    visible = (row < queries) & (col < keys)
    if BOUND_LEFT:
        visible = visible & (col >= position - left)
    if BOUND_RIGHT:
        visible = visible & (col <= position + right)
    if MASK > 0:
        at = mask_at + row.to(tl.int64) * mask_row + col.to(tl.int64) * mask_col
        entry = tl.load(at, mask=(row < queries) & (col < keys), other=0)
        if MASK == 1:
            visible = visible & (entry != 0)
        else:
            bias = entry.to(tl.float32)
            s = s + bias
            visible = visible & (bias != float("-inf"))
    return tl.where(visible, s, float("-inf")), tamed, visible
