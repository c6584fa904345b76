"""Float64 checks of a recording: is it what attention read, and did the model compute attention from it?

Each check returns a `Residual`: the largest absolute difference between the recorded float32 value and the
float64 evaluation of the definition, and the largest ratio of that difference to what float32 rounding can
explain. A ratio above 1 means that the recording is not what it says it is (another RoPE layout or base,
another head mapping, a tensor of another layer); `properties.data.capture` then writes nothing.

Layout everywhere `[H, S, D]`: head, position, head dimension; positions are 0..S-1.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
Float32 = NDArray[np.float32]

U = 2.0**-24  # unit roundoff of float32


@dataclass(frozen=True, slots=True)
class Residual:
    """`max_abs`: largest |recorded - float64|. `share_of_bound`: its largest ratio to the rounding bound."""

    max_abs: float
    share_of_bound: float


def gamma(n: int) -> float:
    """Higham's gamma_n: the relative error of a sum of n float32 products, in any order of summation."""
    return n * U / (1 - n * U)


def rotate(x: Float64, base: float) -> tuple[Float64, Float64]:
    """RoPE of `x` [H, S, D] at positions 0..S-1 on half-split pairs (i, i + D/2), and its angles [S, D/2]."""
    half = x.shape[-1] // 2
    theta = base ** (-np.arange(half) / half)
    angle = np.arange(x.shape[-2])[:, None] * theta
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1), angle


def rope_residual(before: Float32, after: Float32, base: float) -> Residual:
    """Compare the recorded rotation `after` with the float64 rotation of `before`, both [H, S, D].

    The model takes a float32 angle: the frequency (a power, 1 ulp; a reciprocal) and the product with the
    position are each rounded, at most 4u of the angle together; cosine and sine add 2u, the two products and
    their sum 2u of |x1| + |x2|. So |difference| <= (|x1| + |x2|) u (4 angle + 4).
    """
    exact, angle = rotate(before.astype(np.float64), base)
    half = angle.shape[-1]
    size = np.abs(before[..., :half].astype(np.float64)) + np.abs(before[..., half:])
    bound = np.tile(size * U * (4 * angle + 4), 2)
    return _residual(after - exact, bound)


def attention(q: Float64, k: Float64, v: Float64) -> tuple[Float64, Float64, Float64]:
    """Causal grouped-query attention in float64.

    q [Hq, S, D]; k, v [Hkv, S, D]; query head h reads KV head h // (Hq / Hkv); scale 1/sqrt(D).
    Returns the output [Hq, S, D], the weights [Hq, S, S] and the scores [Hq, S, S] (-inf above the diagonal).
    """
    group, length, width = q.shape[0] // k.shape[0], q.shape[1], q.shape[2]
    scores = q @ np.repeat(k, group, axis=0).transpose(0, 2, 1) / np.sqrt(width)
    scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights @ np.repeat(v, group, axis=0), weights, scores


def attention_residual(q: Float32, k: Float32, v: Float32, output: Float32) -> Residual:
    """Compare the model's float32 attention output [Hq, S, D] with float64 attention of the recorded q, k, v.

    A score errs by gamma_D scale sum|q||k|, its distance to the row maximum by u of itself, exp by 4u; a
    common factor cancels in the division, so the logarithm of a weight errs by at most twice the row's worst,
    plus the sum of n terms and the quotient; the weighted sum of v adds gamma_n sum p|v|.
    """
    q64, k64, v64 = (x.astype(np.float64) for x in (q, k, v))
    exact, weights, scores = attention(q64, k64, v64)
    group, length, width = q.shape[0] // k.shape[0], q.shape[1], q.shape[2]
    size = np.abs(q64) @ np.abs(np.repeat(k64, group, axis=0)).transpose(0, 2, 1) / np.sqrt(width)
    distance = scores.max(axis=-1, keepdims=True) - scores
    score_error = np.where(np.tri(length, dtype=bool), gamma(width + 1) * size + U * distance, 0.0)
    log_error = 2 * score_error.max(axis=-1, keepdims=True) + 8 * U + gamma(length) + U
    mass = weights @ np.abs(np.repeat(v64, group, axis=0))
    return _residual(output - exact, (np.expm1(log_error) + gamma(length)) * mass)


def sink_mass(weights: Float64) -> list[float]:
    """Mean weight on token 0 of each head of `weights` [H, S, S], without row 0, where it is always 1."""
    return [float(mass) for mass in weights[:, 1:, 0].mean(axis=1)]


def entropy(weights: Float64) -> float:
    """Mean entropy in nats of the later half of the rows, all heads: near ln S if attention is diffuse."""
    later = weights[:, weights.shape[1] // 2 :]
    terms = later * np.log(np.where(later > 0, later, 1.0))
    return float(-terms.sum(axis=-1).mean())


def score_range(scores: Float64) -> float:
    """The widest row: largest difference between two allowed scores of one row, over all heads."""
    lowest = np.where(np.isneginf(scores), np.inf, scores).min(axis=-1)
    return float((scores.max(axis=-1) - lowest).max())


def _residual(difference: Float64, bound: Float64) -> Residual:
    magnitude = np.abs(difference)
    # 0/0 is agreement (position 0 of a zero entry); a difference where no rounding can happen is not.
    share = np.divide(magnitude, bound, out=np.where(magnitude > 0, np.inf, 0.0), where=bound > 0)
    return Residual(max_abs=float(magnitude.max()), share_of_bound=float(share.max()))
