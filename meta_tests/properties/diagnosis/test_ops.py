"""Diagnoses of gradients of single ops, of whole blocks, of packed and paged attention: the defect of each mutant.

As in `test_mutants_are_named`: every mutant of these ops is named or known to be unnamed, and noise gets no "as if".
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from oracle.case import Case
from oracle.formats import FORMATS
from oracle.ops.rope.case import size_of
from properties.diagnosis.counterfactual import failing_case
from properties.diagnosis.engine import diagnose, table_of
from properties.diagnosis.match import match
from properties.judge.pipeline import certify
from properties.judge.verdict import BAD, Verdict
from properties.ops.table import properties_for
from properties.search import judge
from properties.subject import Input, Profile, Subject, subject_for
from targets.calling.registry import resolve
from targets.calling.target import Target
from targets.mutants.table import Mutant, mutant_named, mutants
from targets.probing.probes import probe

PROFILE = Profile("test", 8, 0.3, 128)
OPS = ("rope_backward", "softmax_backward", "gqa_block", "mla_block", "attention_varlen", "attention_paged")
HONEST = {
    "rope_backward": "targets.honest.rope:rope_backward",
    "softmax_backward": "targets.honest.softmax_backward:softmax_backward",
    "gqa_block": "targets.honest.gqa_block:gqa_block",
    "mla_block": "targets.honest.mla_block:mla_block",
    "attention_varlen": "targets.honest.layouts:attention_varlen",
    "attention_paged": "targets.honest.layouts:attention_paged",
}

# Mutant -> what the diagnosis says of the first edge input of its killing property that is wrong in itself.
NAMED = {
    "rope_backward_forward_again": "as if the gradient were rotated forward instead of back",
    "rope_backward_divides_by_magnitude": "as if the result were divided by the magnitude",
    "softmax_backward_delta_dropped": "as if the row sum D were left out",
    "softmax_backward_sum_in_bf16": "as if D were kept in bf16",
    "softmax_backward_last_odd_entry_left_out": "as if the last entry were left out of D",
    "softmax_backward_normalises_again": "as if D were divided by the sum of y (normalised again)",
    "gqa_block_kv_heads_tiled": "as if KV heads were tiled (h mod Hkv) instead of repeated",
    "gqa_block_sees_the_future": "as if the causal mask were ignored",
    "gqa_block_rotation_of_pairs": "as if the layout were interleaved",
    "gqa_block_output_heads_interleaved": "as if the heads' outputs were joined entry by entry",
    "gqa_block_scores_in_fp8": "as if rotated q and k were stored in e4m3",
    "mla_block_latents_in_e4m3_unscaled": "as if latents were kept in e4m3 without a factor",
    "mla_block_key_not_rotated": "as if keys were not rotated",
    "mla_block_positions_ignored": "as if queries counted their positions from 0",
    "mla_block_eps_outside_the_root": "as if eps stood outside the root of the norm",
    "mla_block_scale_from_content_dim": "as if the scale were that of the content part alone, 1/sqrt(d_h)",
    "mla_block_scaling_ignored": "as if scaling were ignored",
    "mla_block_magnitude_ignored": "as if the magnitude were left out",
    "mla_block_mscale_once": "as if the scale held the root of YaRN's factor",
    "varlen_query_lengths_for_keys": "as if the prefix sums of the queries were used for the keys",
    "varlen_neighbour_attended": "as if each sequence read its neighbour's keys up to a whole tile of 4 keys",
    "varlen_kv_heads_tiled": "as if KV heads were tiled (h mod Hkv) instead of repeated",
    "varlen_weights_in_e4m3": "as if P were cast to e4m3, relative to the maximum so far, in tiles of 32 keys",
    "paged_lse_finite": "as if the LSE of an empty row were 0",
    "varlen_slopes_of_first_sequence": "as if all sequences used the ALiBi slopes of the first",
    "paged_last_page_dropped": "as if the last page were never read unless it is full",
    "paged_length_of_previous": "as if each sequence had the length of the one before it",
    "paged_padding_attended": "as if the places behind the last key of a page were attended to",
    "paged_padding_times_zero": (
        "with NaN wherever no sequence has a key: "
        "as if 0 were multiplied by the NaN behind the last key of a page, in K and V"
    ),
    "paged_page_off_by_one": "as if the entry behind the last page were read for it",
    "paged_pages_in_order": "as if pages were taken to follow the first one in memory",
}
# Wrong beside others only: the output of no single call is.
UNNAMED = {"varlen_tile_of_longest"}


def subject_of(target: Target, dtype: str) -> Subject:
    return subject_for(target, dtype, conventions=probe(target, dtype), profile=PROFILE)


def broken_inputs(subject: Subject, mutant: Mutant) -> Iterator[Input]:
    """Edge inputs of the killing property, then of the others, that fail as they are or as the property asks."""
    rows = sorted(properties_for(mutant.op), key=lambda row: row.id != mutant.killed_by)
    for row in rows:
        for edge in row.edges(subject):
            if certify(subject, edge.case).verdict is Verdict.FAIL or judge(subject, row, edge).verdict in BAD:
                yield edge


@pytest.mark.parametrize("name", NAMED)
def test_the_defect_is_named(name: str) -> None:
    mutant = mutant_named(name)
    subject = subject_of(resolve(mutant.target, op=mutant.op), mutant.dtypes[-1])
    said = (diagnose(subject, edge.case, seconds=30.0) for edge in broken_inputs(subject, mutant))
    assert next(text for text in said if text) == NAMED[name]


def test_no_mutant_is_left_out() -> None:
    assert {m.name for m in mutants() if m.op in OPS} == set(NAMED) | UNNAMED


def edge_of(subject: Subject, id: str = "P1") -> Case:
    rows = properties_for(subject.op)
    row = next((r for r in rows if r.id == id), rows[0])
    return min((edge.case for edge in row.edges(subject)), key=lambda case: sum(a.size for a in case.arrays.values()))


def noisy(op: str, size: float) -> Target:
    """An honest kernel whose first output has noise, the same for the same values."""
    honest = resolve(HONEST[op], op=op)
    function = honest.function

    def with_noise(a: torch.Tensor) -> torch.Tensor:
        seed = torch.Generator().manual_seed(zlib.crc32(a.double().numpy().tobytes()))
        return (a.double() + size * torch.randn(a.shape, generator=seed, dtype=torch.float64)).to(a.dtype)

    def broken(**given: Any) -> Any:
        found = function(**given)
        return (with_noise(found[0]), *found[1:]) if isinstance(found, tuple) else with_noise(found)

    return replace(honest, name="noisy", function=broken)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("op", OPS)
def test_noise_is_placed_and_not_explained(op: str, dtype: str) -> None:
    subject = subject_of(noisy(op, 0.5), dtype)
    case = edge_of(subject, "P14" if op == "rope_backward" else "P1")
    found = diagnose(subject, case)
    assert found.startswith("wrong ")


@pytest.mark.parametrize("op", OPS)
def test_an_imprecise_kernel_within_its_bound_has_no_diagnosis(op: str) -> None:
    honest = resolve(HONEST[op], op=op)
    subject = subject_of(honest, "bf16")
    case = edge_of(subject, "P14" if op == "rope_backward" else "P1")
    assert certify(subject, case).verdict is Verdict.PASS
    assert diagnose(subject, case) == ""


def odd_cases(op: str) -> Iterator[tuple[str, Case]]:
    """Shapes and options that a table may not have thought of."""
    rng = np.random.default_rng(7)

    def drawn(dtype: str, **shapes: tuple[int, ...]) -> dict[str, Any]:
        return {n: FORMATS[dtype].store(rng.standard_normal(s)) for n, s in shapes.items()}

    match op:
        case "rope_backward":
            yield "fp64", Case(op, {**drawn("fp64", dy=(1, 1, 1, 2)), "positions": np.array([0])})
            options = {"rotary_dim": 4, "layout": "interleaved"}
            positions = np.array([[0, 2**24, 5], [70000, 1, 2]])
            yield "bf16", Case(op, {**drawn("bf16", dy=(2, 1, 3, 7)), "positions": positions}, options)
        case "softmax_backward":
            for dtype, shape in (("fp64", (1,)), ("bf16", (2, 1, 3)), ("fp32", (3, 40)), ("fp16", (1, 1))):
                yield dtype, Case(op, drawn(dtype, y=shape, dy=shape))
        case "gqa_block":
            shapes: dict[str, tuple[int, ...]]
            for heads, kv, dim, length in ((1, 1, 2, 1), (6, 2, 2, 3), (2, 2, 4, 20)):
                shapes = {
                    "x": (2, length, 5), "w_q": (heads * dim, 5), "w_k": (kv * dim, 5), "w_v": (kv * dim, 5),
                    "w_o": (3, heads * dim), "cos": (length, dim // 2), "sin": (length, dim // 2),
                }  # fmt: skip
                yield "fp32", Case(op, drawn("fp32", **shapes), {"num_heads": heads, "num_kv_heads": kv})
        case "mla_block":
            for heads, length, options in ((1, 1, {}), (3, 4, {"layout": "interleaved", "base": 100.0, "scale": 0.1})):
                shapes = {
                    "x": (2, length, 5), "w_dkv": (4, 5), "w_uk": (heads, 3, 4), "w_uv": (heads, 2, 4), "w_kr": (2, 5),
                    "w_dq": (6, 5), "w_uq": (heads, 3, 6), "w_qr": (heads, 2, 6), "w_o": (7, heads * 2),
                }  # fmt: skip
                positions = np.arange(2 * length).reshape(2, length)
                yield "fp32", Case(op, {**drawn("fp32", **shapes), "positions": positions}, options)
        case _:
            for row in properties_for(op):
                if row.id in ("P3", "P18"):
                    subject = subject_of(resolve(HONEST[op], op=op), "fp32")
                    yield from (("fp32", edge.case) for edge in list(row.edges(subject))[:4])


@pytest.mark.parametrize("op", OPS)
def test_no_counterfactual_stumbles_over_odd_shapes(op: str) -> None:
    tried = 0
    for dtype, case in odd_cases(op):
        subject = subject_for(replace(resolve(HONEST[op], op=op), contract=None), dtype, profile=PROFILE)
        observed = subject.call(case)
        assert observed.fault is None
        wrong = {n: (v.astype(np.float64) * 3 + 1).astype(v.dtype) for n, v in observed.outputs.items()}
        failing = failing_case(subject, case, wrong)
        said = []
        for row in table_of(op).hypotheses:
            for c in row.imagine(failing):
                assert match(failing, c, quick=False).fits.shape == (len(subject.forms),)
                said.append(c.sentence)
                tried += 1
        assert len(set(said)) == len(said)
        related = [make(subject, case) for _, make in table_of(op).related]
        for other in [*(c for c in related if c is not None), *table_of(op).wider(case)]:
            assert subject.call(other).fault is None
    assert tried > 10


@pytest.mark.parametrize("rope_type", ["linear", "yarn"])
def test_a_magnitude_of_one_is_not_divided_by(rope_type: str) -> None:
    subject = subject_of(resolve(HONEST["rope_backward"], op="rope_backward"), "fp32")
    scaling: dict[str, Any] = {"rope_type": rope_type, "factor": 4.0}
    if rope_type == "yarn":
        scaling |= {"original_max_position_embeddings": 64}
    arrays = {"dy": np.ones((1, 1, 2, 8), dtype=np.float32), "positions": np.array([1, 2])}
    case = Case("rope_backward", arrays, {"scaling": scaling})
    failing = failing_case(subject, case, subject.call(case).outputs)
    said = [c.sentence for row in table_of("rope_backward").hypotheses for c in row.imagine(failing)]
    assert ("the result were divided by the magnitude" in said) == (size_of(case) != 1)
