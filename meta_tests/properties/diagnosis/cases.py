"""Subjects, failing cases and small cases of the ops, which the tests of diagnoses share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from oracle.case import Case
from properties.judge.verdict import BAD
from properties.ops.rope.table import APPLY_PROPERTIES
from properties.ops.table import properties_for
from properties.property import Property, no_edges
from properties.record import Record
from properties.search import examine, hunt
from properties.subject import Profile, Subject, subject_for
from targets.calling.registry import resolve
from targets.calling.target import target_from
from targets.honest import flash
from targets.mutants.table import Mutant
from targets.probing.probes import probe
from targets.probing.tiny import tiny_case

PROFILE = Profile("test", 8, 0.3, 512)


def subject_of(spec: str, dtype: str) -> Subject:
    target = resolve(spec)
    return subject_for(target, dtype, conventions=probe(target, dtype), profile=PROFILE)


def rows_of(mutant: Mutant) -> tuple[Property, ...]:
    table = APPLY_PROPERTIES if mutant.op == "rope_apply" else properties_for(mutant.op)
    return tuple(row for row in table if row.id == mutant.killed_by)


def failures(subject: Subject, rows: tuple[Property, ...]) -> Iterator[Record]:
    """The smallest failing case that a search finds, else the first failing edge; row by row."""
    for row in rows:
        found = hunt(subject, replace(row, edges=no_edges), seed=1) if row.search is not None else []
        yield from (r for r in found if r.verdict in BAD)
    for row in rows:
        for edge in row.edges(subject):
            record = examine(subject, row, edge)
            if record.verdict in BAD:
                yield record


def attention_case(
    subject: Subject, *, sq: int = 3, sk: int = 33, heads: int = 2, dims: int = 16, **options: Any
) -> Case:
    rng = np.random.default_rng([sq, sk])
    shapes = {"q": (1, heads, sq, dims), "k": (1, heads, sk, dims), "v": (1, heads, sk, dims)}
    return Case("attention", {n: subject.fmt.store(rng.standard_normal(s)) for n, s in shapes.items()}, options)


def rope_case(subject: Subject) -> Case:
    x = np.random.default_rng(4).standard_normal((1, 2, 3, 16))
    return Case("rope", {"x": subject.fmt.store(x), "positions": np.array([0, 5, 300])}, {"layout": "half"})


def softmax_case(subject: Subject, op: str = "softmax") -> Case:
    return Case(op, {"x": subject.fmt.store(np.random.default_rng(4).standard_normal((3, 40)))})


def mla_case(subject: Subject) -> Case:
    rng = np.random.default_rng(4)
    shapes = {
        "q_nope": (1, 2, 3, 8), "q_pe": (1, 2, 3, 4), "c_kv": (1, 20, 16), "k_pe": (1, 20, 4),
        "w_uk": (2, 8, 16), "w_uv": (2, 8, 16),
    }  # fmt: skip
    return Case("mla", {n: subject.fmt.store(rng.standard_normal(s)) for n, s in shapes.items()}, {})


def case_for(subject: Subject) -> Case:
    match subject.op:
        case "attention":
            return attention_case(subject)
        case "rope":
            return rope_case(subject)
        case "mla":
            return mla_case(subject)
        case "rope_apply":
            x = rope_case(subject).arrays["x"]
            angle = np.arange(24.0).reshape(3, 8)
            return Case(
                "rope_apply", {"x": x, "cos": subject.fmt.store(np.cos(angle)), "sin": subject.fmt.store(np.sin(angle))}
            )
        case "softmax" | "log_softmax" | "logsumexp":
            return softmax_case(subject, subject.op)
        case _:
            return tiny_case(subject.op, subject.dtype)


def broken(function: Callable[..., Any], op: str, dtype: str) -> Subject:
    stated = {"causal_alignment": "bottom_right"} if op == "attention" else {}
    function.__attn_oracle__ = {"op": op, "conventions": stated}  # type: ignore[attr-defined]
    return subject_for(target_from(function, spec="made:here", op=op), dtype, profile=PROFILE)


def attention_with(change: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    """Honest attention, then ``change(out, lse, q)``."""

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        is_causal: bool = False,
        attn_mask: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        out, lse = flash.attention(q, k, v, scale=scale, is_causal=is_causal, attn_mask=attn_mask, return_lse=True)
        out, lse = change(out, lse, q)
        return (out, lse) if return_lse else out

    return attention
