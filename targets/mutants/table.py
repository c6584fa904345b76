"""The mutants: what is broken, the property that must kill it, and the public reports behind it.

A row needs no code elsewhere. `target` is imported by whoever runs it; this module imports no torch.
`killed_by` names the one property of the catalogue whose proof of being able to fail the mutant is; others
may kill it too. A mutant that declares a convention (alignment, LSE base, empty rows) does the opposite.
"""

from dataclasses import dataclass

UP_TO_32_BITS = ("fp32", "fp16", "bf16")
SIXTEEN_BITS = ("fp16", "bf16")
FP32 = ("fp32",)
E4M3 = ("e4m3",)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One broken kernel.

    dtypes: those in which `killed_by` must kill it. reports: public ones, as `owner/repo#number`.
    """

    name: str
    op: str
    target: str
    killed_by: str
    dtypes: tuple[str, ...]
    reports: tuple[str, ...]
    defect: str


def _row(op: str, name: str, killed_by: str, defect: str, *reports: str, dtypes: tuple[str, ...]) -> Mutant:
    return Mutant(name, op, f"targets.mutants.{name}:{op}", killed_by, dtypes, reports, defect)


def _attention(
    name: str, killed_by: str, defect: str, *reports: str, dtypes: tuple[str, ...] = UP_TO_32_BITS
) -> Mutant:
    return _row("attention", name, killed_by, defect, *reports, dtypes=dtypes)


def _rope(name: str, killed_by: str, defect: str, *reports: str, dtypes: tuple[str, ...] = UP_TO_32_BITS) -> Mutant:
    return _row("rope", name, killed_by, defect, *reports, dtypes=dtypes)


def _softmax(name: str, killed_by: str, defect: str, *reports: str, dtypes: tuple[str, ...] = UP_TO_32_BITS) -> Mutant:
    return _row("softmax", name, killed_by, defect, *reports, dtypes=dtypes)


def _mla(name: str, killed_by: str, defect: str, *reports: str, dtypes: tuple[str, ...] = UP_TO_32_BITS) -> Mutant:
    return _row("mla", name, killed_by, defect, *reports, dtypes=dtypes)


def _backward(name: str, killed_by: str, defect: str, *reports: str, dtypes: tuple[str, ...] = UP_TO_32_BITS) -> Mutant:
    return _row("attention_backward", name, killed_by, defect, *reports, dtypes=dtypes)


def _varlen(name: str, killed_by: str, defect: str, *reports: str) -> Mutant:
    return _row("attention_varlen", name, killed_by, defect, *reports, dtypes=UP_TO_32_BITS)


def _paged(name: str, killed_by: str, defect: str, *reports: str) -> Mutant:
    return _row("attention_paged", name, killed_by, defect, *reports, dtypes=UP_TO_32_BITS)


MUTANTS: tuple[Mutant, ...] = (
    # Gradients of attention.
    _backward("backward_delta_dropped", "P14", "dS = P o dP: the row sums are left out"),
    _backward("backward_group_not_summed", "P13", "dK and dV hold the share of one query head of the group"),
    _backward("backward_ignores_mask", "P14", "P is recomputed without the masks"),
    _backward("backward_without_sink_gradient", "P17", "the sinks get a gradient of zero"),
    _backward("backward_ds_in_fp16", "P9", "dS stored in fp16 whatever the input dtype", dtypes=("fp32", "bf16")),
    _backward("backward_cap_slope_dropped", "P17", "the gradient passes the soft cap unchanged"),
    _backward("backward_key_scale_missing", "P14", "dK is not multiplied by the scale"),
    _backward("backward_last_query_dropped", "P18", "the last of an odd number of queries gives nothing"),
    _backward("backward_bias_gradient_scaled", "P14", "the mask's gradient is multiplied by the scale"),
    _backward("backward_causal_top_left", "P14", "aligned top-left, bottom-right is declared"),
    _backward("backward_weights_truncated", "G3", "P is truncated for dV, not rounded", dtypes=SIXTEEN_BITS),
    _backward("backward_weights_in_e4m3", "P14", "P cast to e4m3 for dV"),
    _backward(
        "backward_ignores_cotangent", "P25", "dO is taken as ones", "mindspore-lab/mindone#1438"
    ),
    _backward(
        "backward_returns_no_sink_gradient", "P17", "the sinks' gradient is not returned", "ISEEKYAN/Megatron-LM#205"
    ),
    _backward("backward_accumulates_across_calls", "P15", "dQ is added to an earlier call's"),
    # Eight bits: factors of storage, weights that its range does not hold.
    _attention("fp8_weights_unscaled", "P27", "P is cast unscaled, a factor of 256 is declared", dtypes=E4M3),
    _attention("fp8_normalised_then_cast", "P5", "P is normalised, then cast unscaled", "ROCm/aiter#5642", dtypes=E4M3),
    _attention("fp8_weights_saturate", "P9", "P saturates behind a lagging maximum, its sum does not",
               "Dao-AILab/flash-attention#2713", dtypes=E4M3),
    _attention("fp8_factors_of_head_zero", "P13", "all heads read the factors of the first",
               "sgl-project/sgl-kernel-xpu#252", dtypes=E4M3),
    _attention("fp8_factors_of_keys_dropped", "P17", "the factors of k and v are dropped where q has one",
               "vllm-project/vllm#42580", dtypes=E4M3),
    _attention("fp8_factors_by_sequence", "P13", "factors by KV head are averaged over the sequence",
               "vllm-project/vllm#51363", dtypes=E4M3),
    # Range: scores, weights and sums that leave what a format or a shortcut can hold.
    _attention("finite_max_sentinel", "P9", "the running maximum starts at -50000",
               "flashinfer-ai/flashinfer#4450"),
    _attention("max_of_current_tile", "P9", "the tile's maximum replaces the running one",
               "tile-ai/tilelang#1148"),
    _attention("scores_in_fp16", "P9", "q k^T stored in fp16 before scaling",
               "ultralytics/ultralytics#24990", "PaddlePaddle/Paddle#41933", dtypes=("fp16",)),
    _attention("scores_in_bf16", "P9", "scaled scores stored in bf16", "tenstorrent/tt-metal#21199",
               dtypes=SIXTEEN_BITS),
    _attention("accumulator_in_fp16", "P9", "P V accumulates in fp16",
               "ggml-org/llama.cpp#13975", "ikawrakow/ik_llama.cpp#1196"),
    _attention("split_merge_without_max", "P9", "splits merged by e^LSE without a common maximum"),
    _attention("zero_max_after_hidden_tile", "P9", "a hidden tile stores 0 as the row's maximum",
               "Dao-AILab/flash-attention#2082"),
    _attention("fused_exponent", "P9", "fma(s, log2 e, -m') with m' already rounded",
               "pytorch/pytorch#121558",
               dtypes=FP32),
    _attention("lazy_rescaling_mixes_maxima", "P7", "rescale skipped, but P uses the new maximum",
               "meta-pytorch/MSLK#242"),
    # Precision: a stage rounds more than the contract says.
    _attention("accumulator_through_bf16", "P27", "the accumulator passes through bf16 after each tile",
               dtypes=("fp32", "fp16")),
    _attention("denominator_in_bf16", "P5", "the row sum runs in bf16",
               "pytorch/executorch#20089", "tenstorrent/tt-metal#52045", dtypes=SIXTEEN_BITS),
    _attention("denominator_in_fp16", "P8", "the row sum runs in fp16",
               "sonos/tract#2586", dtypes=SIXTEEN_BITS),
    _attention("tf32_dots", "P1", "fp32 inputs multiplied in tf32",
               "triton-lang/triton#1671", "evintunador/triton_docs_tutorials#6", dtypes=FP32),
    _attention("log2e_four_digits", "P8", "log2(e) is 1.442"),
    _attention("exp_quadratic", "P1", "exp with a relative error of 3e-3"),
    _attention("gain_one_percent", "P5", "the output is 1% too large", dtypes=("fp32", "fp16")),
    _attention("scaled_query_rounded", "P8", "q * scale rounded to the input dtype, undeclared",
               dtypes=SIXTEEN_BITS),
    _attention("approximate_reciprocal", "P28", "division by a reciprocal good to 2e-4", dtypes=FP32),
    _attention("denominator_epsilon", "P6", "1e-5 added to the row sum", dtypes=FP32),
    _attention("query_on_fixed_grid", "P25", "q rounded to multiples of 2^-8"),
    _attention("weights_in_e4m3", "G3", "P cast to e4m3 for its product with V"),
    _attention("output_truncated", "P19", "the output is truncated, not rounded",
               "triton-lang/triton#11217", dtypes=SIXTEEN_BITS),
    _attention("weights_truncated", "P19", "P is truncated, not rounded", dtypes=SIXTEEN_BITS),
    _attention("output_promoted", "P23", "16-bit inputs come back in float32", dtypes=SIXTEEN_BITS),
    # Who sees what: masks, alignment, empty rows.
    _attention("empty_row_nan", "P3", "a row without keys gives NaN, zero is declared",
               "pytorch/pytorch#81077", "ml-explore/mlx#2608"),
    _attention("mask_as_finfo_min", "P3", "each mask adds finfo.min: a row without keys attends",
               "huggingface/transformers#17306"),
    _attention("mask_minus_1e4", "P2", "hidden keys get -1e4 added"),
    _attention("mask_adds_minus_inf", "P2", "hidden keys get -inf added, and NaN stays NaN",
               "deepbeepmeep/Wan2GP#1628"),
    _attention("masked_value_leaks", "P2", "0 * NaN from a hidden value, blocked is declared",
               "vllm-project/vllm#936",
               "Dao-AILab/flash-attention#2374", "pytorch/pytorch#101967"),
    _attention("nan_swallowed", "P2", "the guard for empty rows turns NaN into 0", "pytorch/pytorch#141128"),
    _attention("causal_top_left", "P4", "aligned top-left, bottom-right is declared",
               "onnx/onnx#7297", "NVIDIA/cutlass#2336"),
    _attention("causal_bottom_right", "P4", "aligned bottom-right, top-left is declared"),
    _attention("causal_sees_next_key", "P4", "each query sees one key of the future"),
    _attention("causal_ignored", "P17", "is_causal changes nothing", "jax-ml/jax#19237"),
    _attention("causal_dropped_on_full_tiles", "P18", "no causal mask when the keys fill their tiles",
               "bledden/triton-msl#7"),
    _attention("causal_dropped_with_lse", "P4", "no causal mask when the LSE is returned",
               "keras-team/keras#23038"),
    _attention("mask_inverted", "P4", "True read as hidden", "lucidrains/x-transformers#160"),
    _attention("mask_read_as_length", "P4", "a mask reduced to its number of visible keys",
               "microsoft/onnxruntime#18945"),
    _attention("mask_ignored_beyond_512", "P4", "a mask read for the first 512 keys only",
               "vllm-project/vllm-ascend#15503"),
    _attention("mask_of_head_zero", "P13", "all heads use the mask of head 0"),
    _attention("mask_offset_ignores_broadcast", "P4", "a mask [B, 1, Sq, Sk] addressed as if per head",
               "pytorch/pytorch#184180"),
    _attention("first_tile_hidden_nan", "P4", "a wholly hidden first tile gives NaN",
               "pytorch/pytorch#127055"),
    # Indices and extents.
    _attention("tail_keys_kept", "P18", "the zeros behind the last key are attended to",
               "66RING/tiny-flash-attention#12"),
    _attention("last_key_of_full_tile_dropped", "P18", "the last key of a full tile is dropped"),
    _attention("last_tile_dropped", "P4", "the causal loop drops a partial last tile"),
    _attention("last_odd_row_zeroed", "P18", "the last of an odd number of queries stays zero"),
    _attention("value_tiles_swapped", "P27", "the values of the last two full tiles change places"),
    _attention("head_dim_beyond_64_ignored", "P18", "scores read the first 64 entries only",
               "triton-lang/triton#621"),
    _attention("value_dim_from_head_dim", "P18", "value columns beyond D stay zero",
               "XunhaoLai/native-sparse-attention-triton#27"),
    _attention("gqa_tiled", "P13", "KV heads tiled instead of repeated", "onnx/onnx#7274"),
    _attention("gqa_group_is_kv_heads", "P13", "the number of KV heads used as the size of a group",
               "HazyResearch/HipKittens#22"),
    # Scale and bias.
    _attention("scale_ignored", "P17", "scale changes nothing",
               "pytorch/pytorch#174361", "ROCm/composable_kernel#526"),
    _attention("scale_one_by_default", "P1", "the default scale is 1", "mlc-ai/mlc-llm#3426"),
    _attention("scale_from_padded_dim", "P18", "the default scale is made from the padded head dimension",
               "intel/ipex-llm#12619"),
    _attention("scale_twice_with_mask", "P17", "the path with a mask scales twice"),
    _attention("bias_scaled", "P17", "an additive mask is scaled too", "tenstorrent/tt-metal#55337"),
    # Windows, soft caps, ALiBi, sinks.
    _attention("window_one_key_too_far", "P4", "the window reaches one key further to the left"),
    _attention("window_one_key_short_in_decode", "P4", "with one query the window misses its first key"),
    _attention("window_without_right_end", "P4", "the window's right bound is dropped"),
    _attention("window_ignored", "P17", "a window changes nothing"),
    _attention("window_ignored_in_decode", "P18", "a window is ignored where there is one query"),
    _attention("window_empty_row_sees_all", "P3", "a row whose window lies past all keys attends to all"),
    _attention("softcap_ignored", "P17", "a soft cap changes nothing",
               "vllm-project/vllm-metal#665", "sgl-project/sgl-kernel-xpu#491"),
    _attention("softcap_after_mask", "P17", "the cap comes after the mask, before it is declared"),
    _attention("softcap_multiplies_by_tanh", "P17", "s tanh(s) instead of c tanh(s / c)",
               "Dao-AILab/flash-attention#2402"),
    _attention("softcap_by_exponentials", "P9", "tanh as a quotient of exponentials that overflow"),
    _attention("alibi_favours_far_keys", "P1", "the sign of ALiBi is flipped", "meta-pytorch/attention-gym#86"),
    _attention("alibi_ignored", "P17", "slopes change nothing"),
    _attention("slopes_of_head_zero", "P13", "all heads use the slope of head 0"),
    _attention("slopes_of_first_sequence", "P13", "all sequences use the slopes of the first"),
    _attention("sinks_ignored", "P17", "sinks change nothing", "NVIDIA/TransformerEngine#3551"),
    _attention("sinks_of_head_zero", "P13", "all heads use the sink of head 0"),
    _attention("sink_scaled", "P5", "the sink is multiplied by the scale", "ROCm/rocm-libraries#12229"),
    _attention("sink_in_every_split", "P5", "each split of the keys counts the sink", "ROCm/rocm-libraries#12229"),
    _attention("sink_dropped_with_window", "P17", "no sink where there is a window", "sgl-project/sglang#11634"),
    _attention("lse_without_sink", "P8", "the LSE leaves the sink out, in is declared"),
    # LSE.
    _attention("lse_base_two", "P8", "the LSE is in base 2, e is declared", "flashinfer-ai/flashinfer#2113"),
    _attention("lse_plus_inf", "P3", "the LSE of an empty row is +inf, -inf is declared",
               "Dao-AILab/flash-attention#978"),
    _attention("lse_finite", "P7", "the LSE of an empty row is 0, -inf is declared",
               "vllm-project/vllm#49294"),
    # Side effects.
    _attention("query_scaled_in_place", "P15", "the caller's q is overwritten", "unslothai/unsloth#5001"),
    _attention("pads_past_the_end", "P15", "memory behind K is zeroed", "Dao-AILab/flash-attention#638"),
    # Layouts, batches, steps, dropout.
    _attention("sink_ignored_in_decode", "P10", "with one query sinks change nothing", "ml-explore/mlx#3452"),
    _attention("splits_follow_batch", "P11", "splits follow the batch, invariance is declared",
               "deepseek-ai/FlashMLA#212"),
    _attention("strides_ignored", "P12", "keys are read as if contiguous",
               "pytorch/pytorch#181133", "pytorch/pytorch#112577"),
    _attention("stride_zero_ignored", "P12", "expanded values are read as if contiguous"),
    _attention("offset_wraps", "P20", "a key's place is counted in 32 bits",
               "thu-ml/SageAttention#386", "Dao-AILab/flash-attention#2260"),
    _attention("dropout_not_rescaled", "P22", "what dropout leaves is not divided by 1 - p"),
    _attention("dropout_in_evaluation", "P22", "dropout stays active outside of training", "pytorch/pytorch#124464"),
    _attention("dropout_before_the_sum", "P22", "the denominator sums what was not dropped",
               "aws-neuron/nki-samples#80"),
    _attention("dropout_seed_ignored", "P22", "a seed repeats nothing"),
    _attention("dropout_same_in_every_call", "P22", "every call drops the same weights"),
    # Packed sequences and pages.
    _varlen("varlen_query_lengths_for_keys", "P1", "cu_seqlens_q used for the keys"),
    _varlen("varlen_neighbour_attended", "P2", "a sequence reads its neighbour's keys up to a whole tile"),
    _varlen("varlen_slopes_of_first_sequence", "P17", "all sequences use the slopes of the first"),
    _varlen("varlen_tile_of_longest", "P11", "splits follow the longest sequence, invariance is declared",
            "flashinfer-ai/flashinfer#2424"),
    _varlen("varlen_kv_heads_tiled", "P13", "KV heads tiled instead of repeated"),
    _varlen("varlen_weights_in_e4m3", "G3", "P cast to e4m3 for its product with V"),
    _paged("paged_lse_finite", "P7", "the LSE of a sequence without keys is 0, -inf is declared"),
    _paged("paged_last_page_dropped", "P18", "a last page that is not full is never read"),
    _paged("paged_page_off_by_one", "P1", "the entry behind the last page is read for it"),
    _paged("paged_length_of_previous", "P1", "a sequence reads the length of the one before it"),
    _paged("paged_padding_attended", "P18", "places behind the last key are attended to"),
    _paged("paged_padding_times_zero", "P2", "0 * NaN from places behind the last key",
           "Dao-AILab/flash-attention#2374"),
    _paged("paged_pages_in_order", "P12", "pages are taken to follow the first one in memory"),
    # Rotary embedding.
    _rope("rope_layout_ignored", "P17", "the layout is always half",
          "kvark/meganeura#38", "vllm-project/vllm-ascend#12820"),
    _rope("rope_layouts_swapped", "P16", "the names of the layouts are exchanged"),
    _rope("rope_halves_exchanged", "P16", "the rotated halves are joined in the wrong order"),
    _rope("rope_positions_in_bf16", "P16", "positions rounded to bf16", "huggingface/transformers#29285"),
    _rope("rope_positions_in_fp16", "P16", "positions rounded to fp16", "NVIDIA/Megatron-LM#535"),
    _rope("rope_frequencies_in_bf16", "P16", "frequencies rounded to bf16",
          "sgl-project/sglang-jax#1472", "huggingface/transformers#29285"),
    _rope("rope_table_in_input_dtype", "P1", "cos and sin stored in the input dtype, undeclared",
          "EleutherAI/gpt-neox#1003", "Dao-AILab/flash-attention#823", dtypes=SIXTEEN_BITS),
    _rope("rope_turns_saturate", "P16", "the range reduction fails beyond 32767 turns",
          "kekzl/imp#1316", "tenstorrent/tt-metal#51845"),
    _rope("rope_table_too_short", "P16", "positions beyond 4095 read the last row",
          "microsoft/onnxruntime#27597"),
    _rope("rope_exponent_of_pair", "P1", "the exponent is i/d instead of 2i/d"),
    _rope("rope_sine_negated", "P16", "the rotation runs backwards"),
    _rope("rope_base_10050", "P1", "the base is half a percent too large", dtypes=FP32),
    _rope("rope_base_ignored", "P17", "the base is always 10000"),
    _rope("rope_rotates_everything", "P17", "rotary_dim changes nothing", "AI-Hypercomputer/maxtext#4742"),
    _rope("rope_exponent_of_head_dim", "P17", "the exponent of a partial rotation uses the head dimension",
          "pie-project/pie#603"),
    _rope("rope_partial_twice", "P17", "the rotated fraction is applied twice", "vllm-project/vllm#30384"),
    _rope("rope_positions_restart", "P16", "each call counts its positions from 0"),
    _rope("rope_positions_of_first_sequence", "P16", "all sequences use the positions of the first"),
    _rope("rope_cached_by_length", "P15", "a second call gets the first call's angles",
          "lucidrains/rotary-embedding-torch#11"),
    _rope("rope_promotes", "P23", "16-bit inputs come back in float32",
          "huggingface/pytorch-image-models#2794",
          dtypes=SIXTEEN_BITS),
    _rope("rope_magnitude_ignored", "P21", "YaRN's magnitude is left out"),
    _rope("rope_magnitude_squared", "P21", "the magnitude counts twice", "sgl-project/sglang#33558"),
    _rope("rope_attention_factor_ignored", "P21", "a stated attention_factor changes nothing",
          "vllm-project/vllm#46280"),
    _rope("rope_linear_multiplies", "P21", "linear scaling multiplies the frequencies"),
    _rope("rope_dynamic_constant", "P21", "dynamic NTK uses the longest length that is allowed",
          "vllm-project/vllm#41236"),
    _rope("rope_dynamic_keeps_longest", "P15", "dynamic NTK keeps the base of a longer call",
          "huggingface/transformers#27227"),
    _rope("rope_llama3_without_smoothing", "P21", "no band between kept and divided frequencies"),
    _rope("rope_ramp_reversed", "P21", "YaRN divides the fast frequencies"),
    _rope("rope_ramp_always_truncated", "P21", "truncate changes nothing"),
    _rope("rope_longrope_short_always", "P21", "LongRoPE uses its short factors for every length"),
    _rope("rope_longrope_long_always", "P21", "LongRoPE chooses by the size of the cache", "ggml-org/llama.cpp#8995"),
    _rope("rope_longrope_one_early", "P21", "the long factors at exactly the trained length",
          "unslothai/unsloth#10681"),
    _rope("rope_sections_swapped", "P21", "height and width change places"),
    _rope("rope_sections_never_interleaved", "P21", "interleaved sections are read as runs",
          "vllm-project/vllm-gaudi#1437"),
    _rope("rope_single_token_one_behind", "P10", "a single token takes the position before its own"),
    _row("rope_backward", "rope_backward_forward_again", "P14", "the gradient is rotated forward",
         dtypes=UP_TO_32_BITS),
    _row("rope_backward", "rope_backward_divides_by_magnitude", "P21", "the gradient is divided by the magnitude",
         dtypes=UP_TO_32_BITS),
    _row("rope_apply", "rope_apply_truncates", "P1", "the result is truncated to bf16",
         "triton-lang/triton#11217",
         dtypes=("bf16",)),
    # Softmax.
    _softmax("softmax_without_max", "P9", "no maximum is subtracted"),
    _softmax("softmax_sum_in_bf16", "P5", "the row sum runs in bf16",
             "pytorch/executorch#20089", "tenstorrent/tt-metal#52045", dtypes=SIXTEEN_BITS),
    _softmax("softmax_in_input_dtype", "P1", "every stage runs in 16 bits, undeclared", dtypes=SIXTEEN_BITS),
    _softmax("softmax_empty_row_nan", "P9", "a row of -inf gives NaN, zero is declared"),
    _softmax("softmax_implicit_axis", "P5", "the axis follows the number of dimensions"),
    _softmax("softmax_last_odd_entry_left_out", "P18", "the sum misses the last of an odd number of entries"),
    _softmax("softmax_gradient_through_rounded_weights", "P14", "the backward pass reads weights stored in e4m3"),
    _row("softmax_backward", "softmax_backward_delta_dropped", "P28", "the sum over the row is left out",
         dtypes=UP_TO_32_BITS),
    _row("softmax_backward", "softmax_backward_sum_in_bf16", "P9", "the sum over the row runs in bf16",
         dtypes=UP_TO_32_BITS),
    _row("softmax_backward", "softmax_backward_last_odd_entry_left_out", "P18",
         "the sum misses the last of an odd number of entries", dtypes=UP_TO_32_BITS),
    _row("softmax_backward", "softmax_backward_normalises_again", "P1", "D is divided by the sum of the stored y",
         dtypes=UP_TO_32_BITS),
    _row("log_softmax", "log_of_softmax", "P9", "the logarithm of an underflowed softmax",
         dtypes=UP_TO_32_BITS),
    _row("logsumexp", "logsumexp_without_max", "P9", "no maximum is taken out", dtypes=UP_TO_32_BITS),
    _row("logsumexp", "logsumexp_base_two", "P8", "the logarithm has base 2, e is declared",
         dtypes=UP_TO_32_BITS),
    # Whole blocks.
    _row("gqa_block", "gqa_block_kv_heads_tiled", "P13", "query head h reads KV head h mod H_kv", dtypes=UP_TO_32_BITS),
    _row("gqa_block", "gqa_block_sees_the_future", "P4", "the causal rule is left out", dtypes=UP_TO_32_BITS),
    _row("gqa_block", "gqa_block_rotation_of_pairs", "P1", "rows are rotated in the interleaved layout",
         dtypes=UP_TO_32_BITS),
    _row("gqa_block", "gqa_block_output_heads_interleaved", "P18", "the heads' outputs are joined entry by entry",
         dtypes=UP_TO_32_BITS),
    _row("gqa_block", "gqa_block_scores_in_fp8", "P1", "q and k are stored in e4m3 after their rotation",
         dtypes=("fp32", "fp16")),
    _row("mla_backward", "mla_backward_delta_dropped", "P1", "dS = P o dP: the row sums are left out",
         dtypes=UP_TO_32_BITS),
    _row("mla_backward", "mla_backward_first_head_only", "P18", "shared gradients are those of the first head",
         dtypes=UP_TO_32_BITS),
    _row("mla_backward", "mla_backward_absorbed_key_weights_reversed", "P1", "absorbed: dW_UK of the heads in reverse",
         dtypes=UP_TO_32_BITS),
    _row("mla_backward", "mla_backward_intermediates_truncated", "G3", "k, v and their gradients are truncated",
         dtypes=SIXTEEN_BITS),
    _row("mla_backward", "mla_backward_values_detached", "P1", "latents get no gradient through the values",
         dtypes=UP_TO_32_BITS),
    _row("mla_block", "mla_block_latents_in_e4m3_unscaled", "P9", "latents in e4m3 without the factors declared",
         dtypes=UP_TO_32_BITS),
    _row("mla_block", "mla_block_key_not_rotated", "P1", "the shared rotary key is not rotated", dtypes=UP_TO_32_BITS),
    _row("mla_block", "mla_block_positions_ignored", "P16", "queries count their positions from 0",
         dtypes=UP_TO_32_BITS),
    _row("mla_block", "mla_block_eps_outside_the_root", "P17", "the norm divides by sqrt(mean c^2) + eps",
         dtypes=UP_TO_32_BITS),
    _row("mla_block", "mla_block_scale_from_content_dim", "P1", "the default scale is 1/sqrt(d_h)",
         dtypes=UP_TO_32_BITS),
    _row("mla_block", "mla_block_scaling_ignored", "P17", "scaled frequencies are the plain ones",
         dtypes=UP_TO_32_BITS),
    _row("mla_block", "mla_block_magnitude_ignored", "P21", "cos and sin lack the magnitude of scaled frequencies",
         dtypes=UP_TO_32_BITS),
    _row("mla_block", "mla_block_mscale_once", "P21", "YaRN's factor of the softmax scale is not squared",
         dtypes=UP_TO_32_BITS),
    # Multi-head latent attention.
    _mla("mla_rope_part_omitted", "P1", "the scores leave the rotary part out"),
    _mla("mla_scale_from_content_dim", "P1", "the default scale is 1/sqrt(d_h)"),
    _mla("mla_divides_by_scale", "P1", "scores are divided by the scale", "AI-Hypercomputer/maxtext#1370"),
    _mla("mla_rope_key_per_head", "P1", "the shared rotary key is addressed by head"),
    _mla("mla_output_truncated", "G3", "the output is truncated, not rounded", dtypes=SIXTEEN_BITS),
    _mla("mla_absorbed_value_heads_reversed", "P26", "W_UV is applied with the heads reversed"),
)  # fmt: skip
