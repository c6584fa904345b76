"""Every honest variant agrees with plain float64 loops, on inputs that cross its tile borders.

The tolerance counts roundings generously; whether a variant keeps its contract is for the
property suite to say.
"""

import inspect
import subprocess
import sys
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from meta_tests.kernels.plain.exact import Exact
from meta_tests.kernels.plain_reference import REFERENCES
from targets.honest.table import HONEST, Honest

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ROUNDOFF = {"fp64": 2.0**-53, "fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}
TINY = {"fp64": 2.0**-126, "fp32": 2.0**-126, "fp16": 2.0**-24, "bf16": 2.0**-126}
# Those in eight bits: `test_eager_fp8`.
NAMED = [(row, dtype) for row in HONEST for dtype in row.dtypes if dtype in DTYPES]
ROWS = [pytest.param(row, dtype, id=f"{row.name}-{dtype}") for row, dtype in NAMED]
COARSE = (
    "prescaled_query",
    "rounded_row_sum",
    "rope_input_table",
    "softmax_backward_call_by_call",
    "gqa_block_eager",
    "mla_block_kept_in_e4m3",
)  # a stage has the input dtype's resolution
CAUSAL = [(1, 1), (5, 5), (33, 33), (7, 64), (40, 33)]
KEYS = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129]


def load(target: str) -> Any:
    module, function = target.split(":")
    return getattr(import_module(module), function)


def outputs(result: Any) -> tuple[Tensor, ...]:
    if isinstance(result, dict):
        return tuple(result.values())
    return result if isinstance(result, tuple) else (result,)


def assert_close(result: Any, expected: list[Exact], dtype: str, *, described: str = "") -> None:
    """Within the roundings that `Exact` counts, 8 times those of the compute dtype; NaN-strict."""
    compute = 2.0**-53 if dtype == "fp64" else 2.0**-24
    for got, exact in zip(outputs(result), expected, strict=True):
        stored = ROUNDOFF[dtype] * 1.01 if got.dtype == DTYPES[dtype] else compute
        seen = got.double().numpy()
        assert seen.shape == exact.value.shape, described
        finite = np.isfinite(exact.value)
        np.testing.assert_array_equal(seen[~finite], exact.value[~finite], err_msg=described)
        error = np.abs(seen[finite] - exact.value[finite])
        bound = (stored * exact.stored + 8 * compute * exact.computed)[finite] + TINY[dtype]
        assert np.all(error <= bound), f"{described}: {np.max(error - bound)} beyond the tolerance"


def random(generator: torch.Generator, dtype: str, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(DTYPES[dtype])


def attention_cases(generator: torch.Generator, dtype: str) -> list[dict[str, Any]]:
    def qkv(rows: int, keys: int, *, heads: int = 1, shared: int = 1, dim: int = 5, value: int = 3) -> dict[str, Any]:
        shapes = {"q": (2, heads, rows, dim), "k": (2, shared, keys, dim), "v": (2, shared, keys, value)}
        arguments: dict[str, Any] = {n: random(generator, dtype, *shape) for n, shape in shapes.items()}
        return arguments | {"return_lse": True}

    cases = [qkv(2, keys) for keys in KEYS]
    cases += [qkv(rows, keys) | {"is_causal": True} for rows, keys in CAUSAL]
    cases.append(qkv(3, 40, heads=6, shared=2) | {"scale": 0.7})
    hidden = torch.rand(2, 1, 3, 70, generator=generator) < 0.5
    hidden[0, 0, 0] = True
    hidden[1, 0, 1, :64] = True
    cases.append(qkv(3, 70, heads=2) | {"attn_mask": ~hidden})
    cases.append(qkv(3, 70, heads=2) | {"attn_mask": torch.where(hidden, -torch.inf, random(generator, dtype, 3, 70))})
    cases.append(qkv(20, 70) | {"attn_mask": torch.rand(20, 70, generator=generator) < 0.9, "is_causal": True})
    return cases + option_cases(qkv, torch.where(hidden, -torch.inf, random(generator, dtype, 3, 70)))


def option_cases(qkv: Any, bias: Tensor) -> list[dict[str, Any]]:
    """Windows that end inside tiles and at their borders, and past all keys; each option alone, and all together."""
    slopes, sinks = torch.tensor([[0.5, 0.25], [1.0, 0.125]]), torch.tensor([1.0, -2.0])
    cases = [qkv(rows, keys) | {"window_size": w} for rows, keys, w in (
        (1, 40, (31, 0)), (5, 70, (3, 40)), (40, 70, (32, -1)), (9, 3, (1, 1)), (33, 33, (-1, 2)), (3, 3, (1, 0)),
    )]  # fmt: skip
    for options in (
        {"softcap": 2.0}, {"alibi_slopes": slopes}, {"alibi_slopes": slopes[0]}, {"sinks": sinks},
        {"softcap": 2.0, "attn_mask": bias}, {"sinks": sinks, "window_size": (40, 0)},
        {"softcap": 1.5, "alibi_slopes": slopes, "sinks": sinks, "window_size": (50, 3), "attn_mask": bias},
    ):  # fmt: skip
        cases.append(qkv(3, 70, heads=2) | options)
    return [*cases, qkv(9, 3, heads=2) | {"sinks": sinks, "window_size": (1, 1)}]


LAYOUT_OPTIONS: tuple[dict[str, Any], ...] = (
    {}, {"is_causal": True}, {"window_size": (3, 1), "sinks": torch.tensor([1.0, -1.0])},
    {"softcap": 2.0, "alibi_slopes": torch.tensor([[0.5, 0.25], [1.0, 0.5], [0.1, 0.2]]), "scale": 0.4},
)  # fmt: skip


def varlen_cases(generator: torch.Generator, dtype: str) -> list[dict[str, Any]]:
    cases = []
    for pairs in (((5, 5), (33, 33), (1, 1)), ((1, 40), (7, 0), (3, 2)), ((0, 4), (2, 64), (0, 0))):
        sums = {
            f"cu_seqlens_{n}": torch.tensor([0, *np.cumsum([pair[i] for pair in pairs])], dtype=torch.int32)
            for i, n in enumerate("qk")
        }
        q, k = int(sums["cu_seqlens_q"][-1]), int(sums["cu_seqlens_k"][-1])
        shapes = {"q": (q, 2, 5), "k": (k, 1, 5), "v": (k, 1, 3)}
        tensors: dict[str, Any] = {n: random(generator, dtype, *shape) for n, shape in shapes.items()}
        cases += [tensors | sums | {"return_lse": True} | options for options in LAYOUT_OPTIONS]
    return cases


def paged_cases(generator: torch.Generator, dtype: str) -> list[dict[str, Any]]:
    cases = []
    for size, rows, lengths in ((4, 1, (5, 1, 0)), (16, 3, (16, 33, 2)), (1, 2, (3, 7, 2))):
        table = torch.randperm(40, generator=generator).to(torch.int32)[:30].view(3, 10)
        shapes = {"q": (3, 2, rows, 5), "k_cache": (40, size, 1, 5), "v_cache": (40, size, 1, 3)}
        tensors: dict[str, Any] = {n: random(generator, dtype, *shape) for n, shape in shapes.items()}
        tensors |= {"block_table": table, "cache_seqlens": torch.tensor(lengths, dtype=torch.int32)}
        cases += [tensors | {"return_lse": True} | options for options in LAYOUT_OPTIONS]
    return cases


def mla_cases(generator: torch.Generator, dtype: str) -> list[dict[str, Any]]:
    cases = []
    for rows, keys, causal in ((1, 1, False), (3, 33, False), (33, 33, True), (2, 40, True)):
        shapes = {
            "q_nope": (2, 3, rows, 4), "q_pe": (2, 3, rows, 2), "c_kv": (2, keys, 6), "k_pe": (2, keys, 2),
            "w_uk": (3, 4, 6), "w_uv": (3, 5, 6),
        }  # fmt: skip
        tensors: dict[str, Any] = {n: random(generator, dtype, *shape) for n, shape in shapes.items()}
        cases.append(tensors | {"is_causal": causal, "return_lse": True})
    return cases


def rope_cases(generator: torch.Generator, dtype: str) -> list[dict[str, Any]]:
    places = [torch.arange(7), torch.tensor([[0, 1, 2], [40, 41, 3000]]), torch.tensor([9])]
    options: list[dict[str, Any]] = [
        {},
        {"layout": "interleaved"},
        {"rotary_dim": 4},
        {"base": 500.0, "rotary_dim": 6, "layout": "interleaved"},
        {"scaling": {"rope_type": "linear", "factor": 3.0}},
        {"scaling": {"rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": 16}},
        {"scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}},
        {"scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64,
                     "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
        {"scaling": {"rope_type": "longrope", "factor": 8.0, "original_max_position_embeddings": 16,
                     "short_factor": [1.0, 1.5, 2.0, 4.0], "long_factor": [1.5, 3.0, 7.0, 30.0]}},
    ]  # fmt: skip
    sections = {"rope_type": "default", "mrope_section": [1, 1, 2]}
    axes = [
        {"x": random(generator, dtype, 2, 3, place.shape[-1], 8), "scaling": sections,
         "positions": torch.stack([place, place + 1, 2 * place])}
        for place in places
    ]  # fmt: skip
    return axes + [
        {"x": random(generator, dtype, 2, 3, place.shape[-1], 8), "positions": place, **more}
        for place in places
        for more in options
    ]


def rope_backward_cases(generator: torch.Generator, dtype: str) -> list[dict[str, Any]]:
    cases = rope_cases(generator, dtype)
    return [{"dy": case.pop("x"), **case} for case in cases]


def rope_apply_cases(generator: torch.Generator, dtype: str) -> list[dict[str, Any]]:
    angle = torch.rand(5, 3, generator=generator) * 6
    tables = {"cos": angle.cos().to(DTYPES[dtype]), "sin": angle.sin().to(DTYPES[dtype])}
    return [
        {"x": random(generator, dtype, 2, 3, 5, 8), **tables, "layout": layout} for layout in ("half", "interleaved")
    ]


def softmax_cases(generator: torch.Generator, dtype: str) -> list[dict[str, Any]]:
    cases = [{"x": random(generator, dtype, 3, n)} for n in (1, 2, 3, 33, 300)]
    holes = random(generator, dtype, 4, 9)
    holes[0], holes[1, ::2] = -torch.inf, -torch.inf
    return [*cases, {"x": holes}, {"x": random(generator, dtype, 2, 3, 4) * 50}]


def softmax_backward_cases(generator: torch.Generator, dtype: str) -> list[dict[str, Any]]:
    cases = []
    for shape in ((3, 1), (3, 2), (2, 33), (2, 3, 40)):
        weights = torch.softmax(random(generator, "fp64", *shape) * 3, -1).to(DTYPES[dtype])
        cases.append({"y": weights, "dy": random(generator, dtype, *shape)})
    return [*cases, {"y": random(generator, dtype, 3, 9), "dy": random(generator, dtype, 3, 9) * 50}]


def attention_backward_cases(generator: torch.Generator, dtype: str) -> list[dict[str, Any]]:
    def qkv(rows: int, keys: int, *, heads: int = 1, shared: int = 1, dim: int = 5, value: int = 3) -> dict[str, Any]:
        shapes = {"q": (2, heads, rows, dim), "k": (2, shared, keys, dim), "v": (2, shared, keys, value)}
        shapes["do"] = (2, heads, rows, value)
        return {n: random(generator, dtype, *shape) for n, shape in shapes.items()}

    mask = torch.rand(2, 2, 3, 40, generator=generator) < 0.5
    options: list[dict[str, Any]] = [
        {"scale": 0.3},
        {"attn_mask": mask},
        {"attn_mask": random(generator, dtype, 2, 2, 3, 40)},
        {"window_size": (2, 1)},
        {"softcap": 1.5},
        {"alibi_slopes": torch.tensor([0.25, 0.5])},
        {"sinks": torch.tensor([0.5, -1.0]).to(DTYPES[dtype])},
    ]
    cases = [qkv(rows, keys) for rows, keys in ((1, 1), (2, 33), (3, 40))]
    cases += [qkv(3, 3) | {"is_causal": True}, qkv(4, 2) | {"is_causal": True}, qkv(3, 9, heads=4, shared=2)]
    return cases + [qkv(3, 40, heads=2) | more for more in options]


def gqa_block_cases(generator: torch.Generator, dtype: str) -> list[dict[str, Any]]:
    cases = []
    for rows, heads, shared in ((1, 1, 1), (5, 4, 2), (33, 3, 1)):
        width, dim = 6, 4
        shapes = {"w_q": (heads * dim, width), "w_k": (shared * dim, width), "w_v": (shared * dim, width),
                  "w_o": (5, heads * dim)}  # fmt: skip
        tensors: dict[str, Any] = {n: 0.4 * random(generator, dtype, *shape) for n, shape in shapes.items()}
        angle = torch.arange(rows)[:, None] * torch.tensor([1.0, 0.1])
        tensors |= {"cos": angle.cos().to(DTYPES[dtype]), "sin": angle.sin().to(DTYPES[dtype])}
        cases.append(
            {"x": random(generator, dtype, 2, rows, width), **tensors, "num_heads": heads, "num_kv_heads": shared}
        )
    return cases


def mla_block_cases(generator: torch.Generator, dtype: str) -> list[dict[str, Any]]:
    cases = []
    for rows, heads, layout in ((1, 1, "half"), (5, 2, "interleaved"), (20, 2, "half")):
        shapes = {"w_dkv": (6, 5), "w_uk": (heads, 4, 6), "w_uv": (heads, 3, 6), "w_kr": (4, 5), "w_dq": (7, 5),
                  "w_uq": (heads, 4, 7), "w_qr": (heads, 4, 7), "w_o": (5, heads * 3)}  # fmt: skip
        tensors: dict[str, Any] = {n: 0.4 * random(generator, dtype, *shape) for n, shape in shapes.items()}
        places = torch.arange(rows) + 3
        case = {"x": random(generator, dtype, 2, rows, 5), "positions": places, **tensors, "layout": layout}
        gains = {"norm_kv": 1 + 0.2 * random(generator, dtype, 6), "norm_q": 1 + 0.2 * random(generator, dtype, 7)}
        cases += [case, case | gains | {"positions": torch.stack([places, places + 9]), "eps": 1e-3}]
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "mscale": 0.5}
    scalings = ({**yarn, "mscale_all_dim": 1.0}, {"rope_type": "linear", "factor": 3.0},
                {"rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": 16})  # fmt: skip
    return cases + [cases[-1] | {"scaling": scaling} for scaling in scalings]


def mla_backward_cases(generator: torch.Generator, dtype: str) -> list[dict[str, Any]]:
    cases = []
    for arguments in mla_cases(generator, dtype):
        plain = {n: a for n, a in arguments.items() if n != "return_lse"}
        batch, heads, rows, _ = plain["q_nope"].shape
        cases.append(plain | {"do": random(generator, dtype, batch, heads, rows, plain["w_uv"].shape[1])})
    return cases


CASES = {
    "mla_backward": mla_backward_cases,
    "mla_block": mla_block_cases,
    "gqa_block": gqa_block_cases,
    "attention_varlen": varlen_cases,
    "attention_paged": paged_cases,
    "attention_backward": attention_backward_cases,
    "softmax_backward": softmax_backward_cases,
    "attention": attention_cases, "mla": mla_cases, "rope": rope_cases, "rope_apply": rope_apply_cases,
    "rope_backward": rope_backward_cases,
    "softmax": softmax_cases, "log_softmax": softmax_cases, "logsumexp": softmax_cases,
}  # fmt: skip


@pytest.mark.parametrize(("row", "dtype"), ROWS)
def test_agrees_with_plain_loops(row: Honest, dtype: str) -> None:
    function = load(row.target)
    reference = REFERENCES[row.op]
    if row.name == "other_options":
        reference = partial(reference, other_options=True)
    generator = torch.Generator().manual_seed(20240707)
    taken = inspect.signature(function).parameters
    for arguments in CASES[row.op](generator, dtype):
        if not set(arguments) <= set(taken):
            continue
        kept = {name: value.clone() for name, value in arguments.items() if isinstance(value, Tensor)}
        result = function(**arguments)
        described = ", ".join(f"{n}={tuple(v.shape) if isinstance(v, Tensor) else v}" for n, v in arguments.items())
        exact = reference(**arguments)
        if row.name in COARSE and dtype in ("fp16", "bf16"):
            coarser = ROUNDOFF[dtype] / 2.0**-24
            exact = [one._replace(computed=one.computed * coarser) for one in exact]
        assert_close(result, exact, dtype, described=described)
        assert all(torch.equal(arguments[name], value) for name, value in kept.items() if not value.isnan().any())


@pytest.mark.parametrize("row", HONEST, ids=lambda row: row.name)
def test_the_table_says_what_the_function_declares(row: Honest) -> None:
    declared = load(row.target).__attn_oracle__
    assert (declared["op"], declared["dtypes"]) == (row.op, row.dtypes)


@pytest.mark.parametrize(
    "target",
    [row.target for row, dtype in NAMED if row.op == "attention" and row.name != "other_options" and dtype == "fp32"],
    ids=lambda target: target.split(":")[-1],
)
def test_hidden_nan_and_inf_are_blocked_and_seen_ones_are_not(target: str) -> None:
    function = load(target)
    q, k, v = torch.randn(3, 1, 1, 40, 4, generator=torch.Generator().manual_seed(1))
    clean = function(q, k, v, is_causal=True, return_lse=True)
    for poison in (torch.nan, torch.inf, 1e30):
        bad_k, bad_v = k.clone(), v.clone()
        bad_k[..., 35, :], bad_v[..., 35, :] = poison, poison
        out, log = function(q, bad_k, bad_v, is_causal=True, return_lse=True)
        assert torch.equal(out[..., :35, :], clean[0][..., :35, :])
        assert torch.equal(log[..., :35], clean[1][..., :35])
        assert not torch.isclose(out[..., 35:, :], clean[0][..., 35:, :]).any()


def test_the_tables_import_no_torch() -> None:
    read = "import sys, targets.honest.table, targets.mutants.table as table; table.mutants()"
    program = f"{read}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
