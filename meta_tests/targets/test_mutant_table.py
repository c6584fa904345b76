"""Every mutant is what its row says: on its smallest input it differs from correct values, by numbers alone.

All but the openly wrong survive the test that people usually write.

That each dies by its named property is for the property suite's own meta-test.
"""

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meta_tests.kernels.plain.exact import Exact
from meta_tests.kernels.plain_reference import REFERENCES
from meta_tests.targets.test_honest_variants import DTYPES, assert_close, load, outputs
from targets.mutants import table
from targets.mutants.mutant import Builder
from targets.mutants.table import Mutant, mutant_named, mutants

HONEST = {
    "attention": "targets.honest.flash:attention",
    "attention_varlen": "targets.honest.layouts:attention_varlen",
    "attention_paged": "targets.honest.layouts:attention_paged",
    "attention_backward": "targets.honest.flash_backward:attention_backward",
    "mla": "targets.honest.mla:materialised",
    "rope": "targets.honest.rope:rope", "rope_backward": "targets.honest.rope:rope_backward",
    "rope_apply": "targets.honest.rope:rope_apply",
    "gqa_block": "targets.honest.gqa_block:gqa_block",
    "mla_block": "targets.honest.mla_block:mla_block",
    "mla_backward": "targets.honest.mla_backward:mla_backward",
    "softmax_backward": "targets.honest.softmax_backward:softmax_backward",
    "softmax": "targets.honest.softmax:softmax", "log_softmax": "targets.honest.softmax:log_softmax",
    "logsumexp": "targets.honest.softmax:logsumexp",
}  # fmt: skip
# Any comparison with correct values kills these.
OPENLY_WRONG = {
    "scale_one_by_default", "lazy_rescaling_mixes_maxima", "last_key_of_full_tile_dropped",
    "logsumexp_base_two",
    "backward_delta_dropped", "backward_key_scale_missing", "backward_ignores_cotangent",
    "rope_backward_forward_again",
    "rope_layouts_swapped", "rope_halves_exchanged", "rope_exponent_of_pair", "rope_sine_negated",
    "mla_rope_part_omitted", "mla_scale_from_content_dim", "mla_divides_by_scale", "mla_rope_key_per_head",
    "mla_absorbed_value_heads_reversed",
}  # fmt: skip


def rows(names: Iterable[str]) -> list[Any]:
    chosen = [row for row in mutants() if row.name in set(names)]
    # Those in eight bits: `test_eager_fp8`.
    named = [(row, dtype) for row in chosen for dtype in row.dtypes if dtype in DTYPES]
    return [pytest.param(row, dtype, id=f"{row.name}-{dtype}") for row, dtype in named]


def honest(row: Mutant, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    return outputs(load(HONEST[row.op])(**arguments))


def expected(row: Mutant, arguments: dict[str, Any]) -> list[Exact]:
    top_left = {"top_left": True} if row.name == "causal_bottom_right" else {}
    pairs: list[Exact] = REFERENCES[row.op](**arguments, **top_left)
    return pairs


def smallest(name: str, dtype: str) -> dict[str, Any]:
    """The smallest input of a mutant that has one."""
    build: Builder = load(mutant_named(name).target).__smallest__
    return build(DTYPES[dtype])


# Mutants that single outputs show; the others say in words what shows them, and have tests of their own.
SHOWN = [row.name for row in mutants() if not isinstance(load(row.target).__smallest__, str)]


def test_names_are_single() -> None:
    names = [row.name for row in mutants()]
    assert len(names) == len(set(names))
    assert set(names) >= OPENLY_WRONG
    assert len(SHOWN) > 150


def test_the_table_reads_every_mutant_without_importing_it() -> None:
    """As many as its modules define, found as what they are."""
    modules = {row.target.partition(":")[0] for row in mutants()}
    defined = [name for m in modules for name, it in vars(import_module(m)).items() if hasattr(it, "__smallest__")]
    assert sorted(defined) == sorted(row.name for row in mutants())
    for row in mutants():
        declared = load(row.target).__attn_oracle__
        assert (declared["op"], declared["dtypes"]) == (row.op, row.dtypes), row.name


def test_a_block_is_all_that_a_mutant_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "HERE", tmp_path)
    module = tmp_path / "softmax" / "weights.py"
    module.parent.mkdir()
    module.write_text('@mutant("softmax", "P9", "It is 0.", reports="Reported: a/b#1.", smallest=x)\ndef zero(): ...\n')
    wanted = "targets.mutants.softmax.weights:zero"
    assert list(table.read(module)) == [
        Mutant("zero", "softmax", wanted, "P9", ("fp32", "fp16", "bf16"), ("a/b#1",), "It is 0.")
    ]
    module.write_text('one = mutant("softmax", "P9", SENTENCE, smallest=x)(kernel)\n')
    with pytest.raises(ValueError, match="malformed node"):
        list(table.read(module))


def test_a_wrong_name_says_which_are_near() -> None:
    assert mutant_named("mask_inverted").target == "targets.mutants.attention.masks:mask_inverted"
    with pytest.raises(KeyError, match=r"no mutant is called mask_of_head; mask_of_head_zero\?"):
        mutant_named("mask_of_head")


@pytest.mark.parametrize(("row", "dtype"), rows(SHOWN))
def test_differs_by_numbers_alone(row: Mutant, dtype: str) -> None:
    """Same shapes and dtypes as the honest kernel, which is right on this input, while the mutant is not."""
    arguments = smallest(row.name, dtype)
    right = honest(row, arguments)
    wrong = outputs(load(row.target)(**arguments))
    assert [(x.shape, x.dtype) for x in wrong] == [(x.shape, x.dtype) for x in right]
    reference = expected(row, arguments)
    if row.name != "causal_bottom_right":  # the honest kernel has the other alignment
        assert_close(right, reference, dtype)
    with pytest.raises(AssertionError):
        assert_close(wrong, reference, dtype)


def casual_inputs(op: str, dtype: torch.dtype) -> list[dict[str, Any]]:
    """What is usually tried: N(0, 1), 64 tokens or 50, no options."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    match op:
        case "attention_backward":
            return [{name: normal(2, 2, s, 64) for name in ("q", "k", "v", "do")} for s in (64, 50)]
        case "attention":
            return [{name: normal(2, 2, s, 64) for name in "qkv"} for s in (64, 50)]
        case "attention_varlen":
            sums = torch.tensor([0, 64, 128], dtype=torch.int32)
            tokens = {name: normal(128, 2, 64) for name in "qkv"}
            return [{**tokens, "cu_seqlens_q": sums, "cu_seqlens_k": sums}]
        case "attention_paged":
            table = torch.arange(8, dtype=torch.int32).view(2, 4)
            caches = {name: normal(8, 16, 2, 64) for name in ("k_cache", "v_cache")}
            lengths = torch.tensor([64, 64], dtype=torch.int32)
            return [{"q": normal(2, 2, 1, 64), **caches, "block_table": table, "cache_seqlens": lengths}]
        case "rope":
            return [{"x": normal(1, 2, 8, 64), "positions": torch.arange(8)}]
        case "rope_backward":
            return [{"dy": normal(1, 2, 8, 64), "positions": torch.arange(8)}]
        case "rope_apply":
            return [{"x": normal(1, 2, 8, 64), "cos": normal(8, 32).cos(), "sin": normal(8, 32).sin()}]
        case "mla_backward":
            given = casual_inputs("mla", dtype)[0]
            return [{**given, "do": normal(1, 2, 8, 16)}]
        case "mla_block":
            shapes = {"x": (1, 8, 32), "w_dkv": (32, 32), "w_uk": (2, 16, 32), "w_uv": (2, 16, 32), "w_kr": (8, 32),
                      "w_dq": (24, 32), "w_uq": (2, 16, 24), "w_qr": (2, 8, 24), "w_o": (32, 32)}  # fmt: skip
            drawn = {n: normal(*s) / (1 if n == "x" else 5) for n, s in shapes.items()}
            return [{**drawn, "positions": torch.arange(8)}]
        case "gqa_block":
            shapes = {"x": (1, 8, 32), "w_q": (64, 32), "w_k": (32, 32), "w_v": (32, 32), "w_o": (32, 64)}
            drawn = {n: normal(*s) / (1 if n == "x" else 5) for n, s in shapes.items()}
            angle = torch.arange(8)[:, None] * 0.5 ** torch.arange(8)
            tables = {"cos": angle.cos().to(dtype), "sin": angle.sin().to(dtype)}
            return [{**drawn, **tables, "num_heads": 4, "num_kv_heads": 2}]
        case "softmax_backward":
            return [{"y": normal(*shape).softmax(-1), "dy": normal(*shape)} for shape in ((4, 64), (2, 3, 64))]
        case "mla":
            shapes = {"q_nope": (1, 2, 8, 16), "q_pe": (1, 2, 8, 8), "c_kv": (1, 8, 32), "k_pe": (1, 8, 8),
                      "w_uk": (2, 16, 32), "w_uv": (2, 16, 32)}  # fmt: skip
            return [{name: normal(*shape) for name, shape in shapes.items()}]
    return [{"x": normal(4, 64)}, {"x": normal(2, 3, 64)}]


def survives(row: Mutant, dtype: str) -> bool:
    """On one of the usual inputs nobody would notice: tolerances of 2e-2, the LSE not looked at."""
    function = load(row.target)
    for arguments in casual_inputs(row.op, DTYPES[dtype]):
        # All gradients are usually looked at, and of a forward pass the output.
        count = 3 if row.op == "attention_backward" else 1
        pairs = zip(honest(row, arguments)[:count], outputs(function(**arguments))[:count], strict=True)
        if all(torch.allclose(wrong.float(), right.float(), rtol=2e-2, atol=2e-2) for right, wrong in pairs):
            return True
    return False


@pytest.mark.parametrize(("row", "dtype"), rows(row.name for row in mutants()))
def test_is_alive_on_casual_input(row: Mutant, dtype: str) -> None:
    assert survives(row, dtype) == (row.name not in OPENLY_WRONG)


def test_backward_returns_no_sink_gradient() -> None:
    row = mutant_named("backward_returns_no_sink_gradient")
    arguments = smallest("backward_without_sink_gradient", "fp32")
    assert set(load(row.target)(**arguments)) == {"dq", "dk", "dv"}
    assert set(load(HONEST[row.op])(**arguments)) == {"dq", "dk", "dv", "dsinks"}


def test_backward_accumulates_across_calls() -> None:
    function = load(mutant_named("backward_accumulates_across_calls").target)
    arguments = smallest("backward_delta_dropped", "fp32") | {"q": torch.full((1, 1, 1, 1), 3.0)}
    first, second = function(**arguments)["dq"], function(**arguments)["dq"]
    assert second.equal(2 * first) or second.equal(first + first)


@pytest.mark.parametrize("name", ["output_truncated", "weights_truncated"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_truncation_goes_one_way(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 1, 40, 8, generator=generator).to(dtype) for _ in range(3))
    row, arguments = mutant_named(name), {"q": q, "k": k, "v": v.abs() + 0.5}
    right, wrong = honest(row, arguments)[0].double(), outputs(load(row.target)(**arguments))[0].double()
    assert (wrong <= right).all()
    assert (wrong < right).double().mean() > 0.2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_truncation_of_the_weights_shortens_dv(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    given = {n: torch.randn(1, 1, 40, 8, generator=generator).to(dtype) for n in ("q", "k", "v", "do")}
    row, arguments = mutant_named("backward_weights_truncated"), given | {"do": given["do"].abs() + 0.5}
    right, wrong = honest(row, arguments), outputs(load(row.target)(**arguments))
    assert all(a.equal(b) for a, b in zip(right[:2], wrong[:2], strict=True))
    assert (wrong[2] <= right[2]).all()
    assert (wrong[2] < right[2]).double().mean() > 0.2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_truncation_of_latent_attention(dtype: torch.dtype) -> None:
    row, arguments = mutant_named("mla_output_truncated"), casual_inputs("mla", dtype)[0]
    wide = {n: x.float() if isinstance(x, Tensor) else x for n, x in arguments.items()}
    right, wrong = honest(row, wide)[0].double(), outputs(load(row.target)(**arguments))[0].double()
    assert (wrong.abs() <= right.abs()).all()
    assert (right.to(dtype).double() != wrong).double().mean() > 0.2


def test_truncation_of_what_latents_make() -> None:
    row, arguments = (
        mutant_named("mla_backward_intermediates_truncated"),
        casual_inputs("mla_backward", torch.bfloat16)[0],
    )
    ones = {n: torch.ones_like(x) if n == "q_pe" else x.abs() for n, x in arguments.items()}
    right, wrong = honest(row, ones), outputs(load(row.target)(**ones))
    # dv is made of positive numbers, and dW_UV of it.
    assert (wrong[5] <= right[5]).all()
    assert (wrong[5] < right[5]).double().mean() > 0.2


def test_query_scaled_in_place() -> None:
    attention = load(mutant_named("query_scaled_in_place").target)

    q, k, v = torch.ones(3, 1, 1, 1, 4)
    assert outputs(attention(q.clone(), k, v))[0].equal(
        honest(mutant_named("query_scaled_in_place"), {"q": q, "k": k, "v": v})[0]
    )
    attention(q, k, v)
    assert q.tolist() == [[[[0.5] * 4]]]


def test_pads_past_the_end() -> None:
    attention = load(mutant_named("pads_past_the_end").target)

    buffer = torch.ones(2, 1)
    k = buffer[None, None, :1]
    attention(torch.ones(1, 1, 1, 1), k, torch.ones(1, 1, 1, 1))
    assert buffer.tolist() == [[1.0], [0.0]]


def test_rope_cached_by_length() -> None:
    rope = load(mutant_named("rope_cached_by_length").target)

    x = torch.ones(1, 1, 1, 2)
    base = 12345.0  # no other test has filled the cache for this one
    first = rope(x, torch.tensor([1]), base=base)
    assert first.equal(
        honest(mutant_named("rope_cached_by_length"), {"x": x, "positions": torch.tensor([1]), "base": base})[0]
    )
    assert rope(x, torch.tensor([2]), base=base).equal(first)


def test_rope_dynamic_keeps_longest() -> None:
    rope = load(mutant_named("rope_dynamic_keeps_longest").target)

    scaling = {"rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": 64}
    short = {"x": torch.ones(1, 1, 1, 4), "positions": torch.tensor([1]), "scaling": scaling}
    before = rope(**short)
    assert before.equal(honest(mutant_named("rope_dynamic_keeps_longest"), short)[0])
    rope(short["x"], torch.tensor([100]), scaling=scaling)
    assert not rope(**short).equal(before)


def test_softmax_gradient_through_rounded_weights() -> None:
    softmax = load(mutant_named("softmax_gradient_through_rounded_weights").target)

    x = torch.tensor([[0.0, -0.75]])
    right = honest(mutant_named("softmax_gradient_through_rounded_weights"), {"x": x})[0]
    assert softmax(x).equal(right)
    leaf = x.clone().requires_grad_()
    dx = torch.autograd.grad(softmax(leaf), leaf, torch.tensor([[1.0, 0.0]]))[0][0]
    p = right[0].double()
    exact = p * (torch.tensor([1.0, 0.0]) - p[0])
    assert ((dx - exact).abs() > 0.01 * exact.abs()).all()


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_output_promoted(dtype: str) -> None:
    attention = load(mutant_named("output_promoted").target)

    q, k, v = torch.ones(3, 1, 1, 1, 4, dtype=DTYPES[dtype])
    assert attention(q, k, v).dtype == torch.float32


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_rope_promotes(dtype: str) -> None:
    rope = load(mutant_named("rope_promotes").target)

    assert rope(torch.ones(1, 1, 1, 2, dtype=DTYPES[dtype]), torch.tensor([1])).dtype == torch.float32


def test_varlen_tile_of_longest() -> None:
    attention_varlen = load(mutant_named("varlen_tile_of_longest").target)

    q, k, v = torch.randn(3, 50, 1, 8, generator=torch.Generator().manual_seed(0))
    sums = torch.tensor([0, 16, 50], dtype=torch.int32)
    together = attention_varlen(q, k, v, sums, sums, return_lse=True)
    alone = attention_varlen(q[:16], k[:16], v[:16], sums[:2], sums[:2], return_lse=True)
    assert not alone[1].equal(together[1][:, :16])
    torch.testing.assert_close(alone[0], together[0][:16])
