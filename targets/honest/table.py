"""The honest variants: every property must let every one of them live. Targets are named, not imported."""

from dataclasses import dataclass

ALL = ("fp64", "fp32", "fp16", "bf16")
EIGHT_BITS = ("e4m3", "e5m2")
UP_TO_32_BITS = ("fp32", "fp16", "bf16")


@dataclass(frozen=True, slots=True)
class Honest:
    """One correct kernel: where it is, which dtypes it takes, and its form."""

    name: str
    op: str
    target: str
    dtypes: tuple[str, ...]
    form: str


def _flash(name: str, form: str) -> Honest:
    return Honest(name, "attention", f"targets.honest.flash_variants:{name}", UP_TO_32_BITS, form)


def _other(name: str, op: str, target: str, form: str, *, dtypes: tuple[str, ...] = UP_TO_32_BITS) -> Honest:
    return Honest(name, op, f"targets.honest.{target}", dtypes, form)


HONEST: tuple[Honest, ...] = (
    _other("flash", "attention", "flash:attention", "tiles of 32 keys, P cast to the input dtype", dtypes=ALL),
    _flash("tile_16", "tiles of 16 keys"),
    _flash("tile_64", "tiles of 64 keys"),
    _flash("tile_128", "tiles of 128 keys"),
    _flash("exp2_domain", "log2(e) folded into the scale, exp2, LSE turned back to nats"),
    _flash("rounded_maximum", "exp2(fma(s, log2 e, -m')) with m' = m log2(e) rounded"),
    _flash("split_2", "2 splits of the keys, merged by their LSE"),
    _flash("split_3", "3 splits, of unequal length for most numbers of keys, merged by their LSE"),
    _flash("split_4", "4 splits of the keys, merged by their LSE"),
    _flash("split_8", "8 splits of the keys, merged by their LSE"),
    _flash("splits_as_asked", "a number of splits that is a parameter"),
    _flash("reversed_keys", "tiles from the last key to the first"),
    _flash("uncast_weights", "P stays in float32"),
    _flash("prescaled_query", "q * scale rounded to the input dtype, as its contract declares"),
    _flash("lazy_rescaling", "a maximum that may lag by a factor 2^8, as its contract declares"),
    _flash("rounded_row_sum", "the row sum adds the rounded P"),
    _flash(
        "other_options", "window without its left end, cap after the mask, ALiBi by key index, LSE without the sink"
    ),
    _other("normalised", "attention", "normalised:attention", "P divided by the row sum before its cast"),
    _other(
        "flash_backward", "attention_backward", "flash_backward:attention_backward", "D from the output", dtypes=ALL
    ),
    *(
        _other(name, "attention_backward", f"flash_backward_variants:{name}", form)
        for name, form in (
            ("backward_delta_of_weights", "D from the weights"),
            ("backward_exp2", "P by exp2"),
            ("backward_uncast", "P and dS stay in float32"),
            ("backward_head_by_head", "each query head's share added in turn"),
        )
    ),
    _other("dropout", "attention", "dropout:attention", "dropout of the normalised weights, in one sweep"),
    _other("varlen", "attention_varlen", "layouts:attention_varlen", "one packed sequence after the other", dtypes=ALL),
    _other("paged", "attention_paged", "layouts:attention_paged", "pages gathered for each sequence", dtypes=ALL),
    _other("fp8", "attention", "fp8:attention", "8 bits, P in e4m3 times 256", dtypes=EIGHT_BITS),
    _other("fp8_unscaled", "attention", "fp8:unscaled", "8 bits, P in e4m3 unscaled, declared", dtypes=EIGHT_BITS),
    _other("fp8_normalised", "attention", "fp8:normalised", "8 bits, P normalised before its cast", dtypes=EIGHT_BITS),
    _other("fp8_in_float32", "attention", "fp8:in_float32", "8-bit inputs, float32 throughout", dtypes=EIGHT_BITS),
    _other("mla_materialised", "mla", "mla:materialised", "keys and values built per head"),
    _other("mla_absorbed", "mla", "mla:absorbed", "projections moved to query and output"),
    _other("rope", "rope", "rope:rope", "float32 angles, both layouts", dtypes=ALL),
    _other("rope_fp64_angle", "rope", "rope_variants:fp64_angle", "float64 angles"),
    _other(
        "rope_input_table",
        "rope",
        "rope_variants:input_table",
        "cos and sin stored in the input dtype, declared",
    ),
    _other("rope_complex", "rope", "rope_variants:complex_product", "a complex product"),
    _other("rope_exp", "rope", "rope_variants:exponential", "frequencies as exp(-t ln base)"),
    _other("rope_host_frequencies", "rope", "rope_variants:host_frequencies", "frequencies rounded once from float64"),
    _other("rope_backward", "rope_backward", "rope:rope_backward", "sin negated", dtypes=ALL),
    _other("rope_backward_by_position", "rope_backward", "rope_variants:backward_by_position", "positions negated"),
    _other("rope_apply", "rope_apply", "rope:rope_apply", "the rotation alone, in float32", dtypes=ALL),
    _other("gqa_block", "gqa_block", "gqa_block:gqa_block", "flash attention between stored projections", dtypes=ALL),
    _other("gqa_block_eager", "gqa_block", "gqa_block:eager", "every call stored in the input dtype, declared"),
    _other("gqa_block_fp32", "gqa_block", "gqa_block:in_float32", "everything in float32, declared"),
    _other("mla_backward", "mla_backward", "mla_backward:mla_backward", "P from the saved L, D from O", dtypes=ALL),
    _other(
        "mla_backward_delta_from_weights",
        "mla_backward",
        "mla_backward:delta_from_weights",
        "D as the sum of P dP",
        dtypes=ALL,
    ),
    _other(
        "mla_backward_absorbed", "mla_backward", "mla_backward:absorbed", "to the latents, D from their sum", dtypes=ALL
    ),
    _other(
        "mla_backward_absorbed_delta_from_weights",
        "mla_backward",
        "mla_backward:absorbed_delta_from_weights",
        "to the latents, D as the sum of P dP",
        dtypes=ALL,
    ),
    _other("mla_block", "mla_block", "mla_block:mla_block", "keys and values built per head"),
    _other("mla_block_absorbed", "mla_block", "mla_block:absorbed", "attention to the latents"),
    _other("mla_block_decoded", "mla_block", "mla_block:decoded", "row by row from the kept latents"),
    _other("mla_block_kept_in_e4m3", "mla_block", "mla_block:kept_in_e4m3", "latents in 8 bits with factors, declared"),
    _other("softmax", "softmax", "softmax:softmax", "float32 reduction", dtypes=ALL),
    _other("softmax_exp2", "softmax", "softmax:softmax_exp2", "exp2 of (x - m) log2(e)", dtypes=ALL),
    _other("softmax_backward", "softmax_backward", "softmax_backward:softmax_backward", "y (dy - D)", dtypes=ALL),
    _other(
        "softmax_backward_two_products", "softmax_backward", "softmax_backward:two_products", "y dy - y D", dtypes=ALL
    ),
    _other(
        "softmax_backward_call_by_call",
        "softmax_backward",
        "softmax_backward:call_by_call",
        "each call stored in the input dtype, declared",
    ),
    _other("log_softmax", "log_softmax", "softmax:log_softmax", "(x - m) - ln l", dtypes=ALL),
    _other("log_softmax_by_lse", "log_softmax", "softmax:log_softmax_by_lse", "x - L", dtypes=ALL),
    _other("logsumexp", "logsumexp", "softmax:logsumexp", "float32 reduction", dtypes=ALL),
)

PLAIN = tuple(
    f"targets.honest.plain:{name}"
    for name in (
        "matmul_softmax",
        "boolean_mask",
        "additive_mask",
        "alibi",
        "exponentials",
        "repeated_heads",
        "grouped_view",
        "key_by_key",
        "in_the_input_dtype",
        "scaled_query",
    )
)
"""Attention as users write it first: what it states little of is found by probes, its gradients are torch's."""
