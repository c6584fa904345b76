"""The block of latent attention."""

from dataclasses import replace

import torch
from torch import Tensor

from oracle.ops.rope.parameters import RopeParameters
from targets.builtin import rope_frequencies_torch as rules
from targets.honest import mla
from targets.honest.mla_block import ABSORBED, MATERIALISED, Steps, Turn, block, rotate, scale_of
from targets.honest.softmax import widen
from targets.mutants.blocks.inputs import YARN, mla_rows
from targets.mutants.mutant import mutant


def saturated(c: Tensor) -> Tensor:
    return c.float().clamp(-448.0, 448.0).to(torch.float8_e4m3fn).to(c.dtype)


mla_block_latents_in_e4m3_unscaled = mutant(
    "mla_block",
    "P9",
    "Latents are kept in e4m3 as they are; a factor of each row is declared.",
    smallest=mla_rows([[500.0]], scale=0.0),
)(block(Steps(core=mla.absorbed, keep=saturated), contract={**ABSORBED, "cache": "e4m3"}))


def unturned(x: Tensor, positions: Tensor, how: Turn) -> Tensor:
    return x.clone()


mla_block_key_not_rotated = mutant(
    "mla_block",
    "P1",
    "The shared rotary key is not rotated.",
    smallest=mla_rows([[0.0, 1.0], [1.0, 0.0]]),
)(block(Steps(rotate_key=unturned), contract=MATERIALISED))


def restarted(x: Tensor, positions: Tensor, how: Turn) -> Tensor:
    return rotate(x, torch.arange(x.shape[-2]), how)


mla_block_positions_ignored = mutant(
    "mla_block",
    "P16",
    "Every call counts its positions from 0, whatever it is given for the queries.",
    smallest=mla_rows([[0.0, 2.0], [2.0, 0.0]], start=3),
)(block(Steps(rotate_query=restarted), contract=MATERIALISED))


def outside(c: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    if gain is None:
        return c
    wide = widen(c)
    root = (wide * wide).mean(-1, keepdim=True).sqrt() + eps
    return (wide / root * widen(gain)).to(c.dtype)


mla_block_eps_outside_the_root = mutant(
    "mla_block",
    "P17",
    "The norm divides by sqrt(mean c^2) + eps.",
    smallest=mla_rows([[0.5]], norm_kv=torch.ones(1), norm_q=torch.ones(1), eps=1.0, scale=0.0),
)(block(Steps(normalise=outside), contract=MATERIALISED))


def of_content(given: float | None, content: int, rotary: int, scaling: RopeParameters | None) -> float:
    return scale_of(given, content, 0, scaling)


mla_block_scale_from_content_dim = mutant(
    "mla_block",
    "P1",
    "The default scale is 1/sqrt(d_h).",
    smallest=mla_rows([[0.0, 1.0], [1.0, 0.0]]),
)(block(Steps(scale=of_content), contract=MATERIALISED))


def plain(x: Tensor, positions: Tensor, how: Turn) -> Tensor:
    return rotate(x, positions, replace(how, scaling=None))


mla_block_scaling_ignored = mutant(
    "mla_block",
    "P17",
    "`scaling` is accepted and plain frequencies are used.",
    smallest=mla_rows([[0.0, 2.0], [2.0, 0.0]], scaling={"rope_type": "linear", "factor": 4.0}),
)(block(Steps(rotate_key=plain, rotate_query=plain), contract=MATERIALISED))


def of_unit_length(x: Tensor, positions: Tensor, how: Turn) -> Tensor:
    given = x if how.scaling is None else x / rules.magnitude(how.scaling)
    return rotate(given, positions, how)


mla_block_magnitude_ignored = mutant(
    "mla_block",
    "P21",
    "Frequencies are scaled, but cos and sin are not multiplied by YaRN's or LongRoPE's magnitude.",
    smallest=mla_rows([[0.0, 0.15625], [0.15625, 0.0]], scaling={**YARN, "attention_factor": 8.0}),
)(block(Steps(rotate_key=of_unit_length, rotate_query=of_unit_length), contract=ABSORBED))


def once(given: float | None, content: int, rotary: int, scaling: RopeParameters | None) -> float:
    whole = scale_of(given, content, rotary, scaling)
    return whole if given is not None else whole / float(rules.softmax_factor(scaling) ** 0.5)


mla_block_mscale_once = mutant(
    "mla_block",
    "P21",
    "YaRN's (1 + m ln(s)/10)^2 multiplies the softmax scale once, without its square.",
    smallest=mla_rows([[0.0, 0.09375], [0.09375, 0.0]], scaling={**YARN, "mscale": 24.0, "mscale_all_dim": 24.0}),
)(block(Steps(scale=once), contract=MATERIALISED))
