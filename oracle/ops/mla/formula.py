"""Multi-head latent attention, the core of one head (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    k^C_j = W_UK c_j,  v_j = W_UV c_j,  S_ij = scale (q^C_i . k^C_j + q^R_i . k^R_j),
    L_i = ln sum_j exp S_ij,  O_i = sum_j softmax(S_i)_j v_j,  sums over the visible keys of each row.

Shapes, one head: q_nope q^C [Sq, d_h], q_pe q^R [Sq, d_r] (already rotated), c_kv c [Sk, d_c], k_pe k^R [Sk,
d_r] (rotated, shared by all heads), w_uk [d_h, d_c], w_uv [d_v, d_c], visible bool [Sq, Sk]; S [Sq, Sk], L
[Sq, 1], O [Sq, d_v]. The default scale is 1/sqrt(d_h + d_r): both parts of a score count (the paper's
equation 18).

Two evaluation orders of the same real function, associativity being all the difference:

- ``materialised`` builds k^C and v for every key, then attends over d_h + d_r components (training, prefill);
- ``absorbed`` takes q~ = W_UK^T q^C, attends to the latents themselves, z_i = sum_j softmax(S_i)_j c_j, and
  applies W_UV to
  z once a row (decoding: the cached c and k^R are all that it reads).

In both, the two parts of a score are one dot product over the concatenated vectors.

Why the enclosures are rigorous: both orders are compositions of matrix products and of
`oracle.ops.attention.formula.attention`, each of which preserves inclusion. Non-finite inputs and empty rows: see
`oracle.ops.mla.case`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from oracle.arithmetic.base import Arithmetic, V
from oracle.ops.attention import formula as attention
from oracle.ops.attention.formula import Attended, Scoring, Visible

FORMS = ("materialised", "absorbed")
DEARER = 4
"""How many times more multiplications an enclosure may spend on the tighter form."""


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Sizes of a published model: width d, heads H, d_h, d_v, d_r, d_c, the query's latent d_c', layers."""

    model: int
    heads: int
    head: int
    value: int
    rope: int
    latent: int
    query_latent: int
    layers: int


DEEPSEEK_V2 = Dimensions(model=5120, heads=128, head=128, value=128, rope=64, latent=512, query_latent=1536, layers=60)
"""DeepSeek-V2, arXiv 2405.04434, section 3.1.2."""

DEEPSEEK_V3 = replace(DEEPSEEK_V2, model=7168, layers=61)
"""DeepSeek-V3, arXiv 2412.19437, section 4.2."""


def mla(
    ar: Arithmetic[V],
    q_nope: V,
    q_pe: V,
    c_kv: V,
    k_pe: V,
    w_uk: V,
    w_uv: V,
    *,
    scale: V,
    visible: Visible,
    form: str = "materialised",
    normalise_first: bool = False,
) -> Attended[V]:
    """One head, evaluated in the order ``form``. ``normalise_first``: see `oracle.ops.attention.formula`."""
    q, k, v = operands(ar, q_nope, q_pe, c_kv, k_pe, w_uk, w_uv, form=form)
    stage = "output" if form == "materialised" else "latent"
    done = attention.attention(
        ar,
        q,
        k,
        v,
        scoring=Scoring(scale),
        visible=visible,
        normalise_first=normalise_first,
        output_stage=stage,
    )
    return done if form == "materialised" else replace(done, out=project(ar, done.out, w_uv))


def operands(
    ar: Arithmetic[V],
    q_nope: V,
    q_pe: V,
    c_kv: V,
    k_pe: V,
    w_uk: V,
    w_uv: V,
    *,
    form: str,
) -> tuple[V, V, V]:
    """The q, k, v of the plain attention that ``form`` reduces to; for ``absorbed``, v is the latents."""
    match form:
        case "materialised":
            k_nope = ar.round(ar.matmul(c_kv, ar.transpose(w_uk), "up_accumulator"), "up")
            v = ar.round(ar.matmul(c_kv, ar.transpose(w_uv), "up_accumulator"), "up")
            return ar.hstack([q_nope, q_pe]), ar.hstack([k_nope, k_pe]), v
        case "absorbed":
            q_latent = ar.round(ar.matmul(q_nope, w_uk, "up_accumulator"), "up")
            return ar.hstack([q_latent, q_pe]), ar.hstack([c_kv, k_pe]), c_kv
        case _:
            raise ValueError(f"unknown form {form!r}; known: {', '.join(FORMS)}")


def project(ar: Arithmetic[V], latent: V, w_uv: V) -> V:
    """O = W_UV z for every row: latent z [r, d_c] -> [r, d_v]."""
    return ar.round(ar.matmul(latent, ar.transpose(w_uv), "up_accumulator"), "output")


def form_for(rows: int, keys: int, *, head: int, rope: int, value: int, latent: int) -> str:
    """The form in which to enclose ``rows`` queries of one head: materialised, unless that is far dearer.

    The materialised form is the tighter one: errors of the weights are common to all components of the
    latent, which an interval forgets before it passes through |W_UV|. But it builds k^C and v for every key:
    a few rows of a long sequence take two orders of magnitude fewer multiplications absorbed.
    """
    materialised = keys * latent * (head + value) + rows * keys * (head + rope + value)
    absorbed = rows * latent * (head + value) + rows * keys * (latent + rope + latent)
    return "materialised" if materialised <= DEARER * absorbed else "absorbed"
