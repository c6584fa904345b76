"""P10 and P11 of attention: what was computed before, and what is computed beside it, does not matter to a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from oracle.case import Case
from oracle.ops.attention.options import taken
from properties.checks.invariance import invariant, with_parameters
from properties.checks.metamorphic import Outputs, full_bounds, observe
from properties.inputs import strategies
from properties.inputs.recipes import Logits, Mask
from properties.judge import judgements as judging
from properties.judge.remembered import judged
from properties.judge.verdict import Judgement, worst_of
from properties.ops.attention.options import NAMES, POSITIONED, alone, held
from properties.ops.attention.relations import agree_on
from properties.subject import Input, Subject


def decodable(subject: Subject) -> tuple[str, ...]:
    """Options under which one query and the keys up to it are a call that sees what prefill sees."""
    aligned = subject.conventions.get("causal_alignment") == "bottom_right"
    return tuple(held(subject, [name for name in NAMES if aligned or name not in POSITIONED]))


def decode(subject: Subject, example: Input) -> Judgement:
    """P10: token by token with growing keys and values, and in chunks, as all at once; within the sum of the bounds."""
    case = example.case
    total = case.arrays["q"].shape[2]
    steps = [(row, row + 1) for row in range(total)]
    if subject.conventions.get("causal_alignment") == "bottom_right" and total > 2:
        steps += [(total // 3, total - 1), (0, total // 3)]
    calls = [case, *(_up_to(case, start, stop) for start, stop in steps)]
    seen = [(part, observe(subject, part)) for part in calls]
    return judged("decode", subject, seen, lambda: _decoded(subject, seen, steps))


def _decoded(subject: Subject, seen: Sequence[tuple[Case, Outputs]], steps: Sequence[tuple[int, int]]) -> Judgement:
    """What all at once gave, which comes first, against what each step gave."""
    (case, whole), parts = seen[0], seen[1:]
    bounds = full_bounds(subject, case, whole)
    found = []
    for (start, stop), (part, own) in zip(steps, parts, strict=True):
        rows, rooms_of_part = slice(start, stop), full_bounds(subject, part, own)
        what = f"queries {start} to {stop - 1} with the keys up to them, and all at once"
        for name in whole:
            gap = np.abs(whole[name][:, :, rows].astype(np.float64) - own[name].astype(np.float64))
            rooms = [b[name][:, :, rows] + o[name] for b, o in zip(bounds, rooms_of_part, strict=True)]
            found.append(judging.kept(subject, gap, rooms, what=what, output=name))
    return worst_of(found)


def _up_to(case: Case, start: int, stop: int) -> Case:
    """Queries start..stop against the keys before ``stop``; one query sees them all without a causal rule."""
    arrays = {"q": case.arrays["q"][:, :, start:stop]} | {n: case.arrays[n][:, :, :stop] for n in ("k", "v")}
    part = case.with_arrays(**arrays)
    if stop - start > 1:
        return part
    bare = part.without_options("is_causal")
    return bare if any(name in case.options for name in POSITIONED) else bare.without_options("causal_alignment")


def decode_edges(subject: Subject) -> Iterator[Input]:
    """One token, a few, across the border of a tile; scores that grow with each; each option alone."""
    yield strategies.attention_input(subject, sq=1, sk=1, is_causal=True, features={"edge": "decode"})
    yield strategies.attention_input(subject, kv_heads=2, sq=7, sk=7, is_causal=True, features={"edge": "decode"})
    growing = Logits("ascending", 40.0)
    yield strategies.attention_input(
        subject, sq=9, sk=9, dims=64, logits=growing, is_causal=True, features={"edge": "grow"}
    )
    yield strategies.attention_input(subject, sq=34, sk=34, dims=8, is_causal=True, features={"edge": "tile"})
    for row, extras in alone(subject, "decode", names=decodable(subject)):
        yield strategies.attention_input(
            subject, kv_heads=2, sq=6, sk=6, is_causal=True, extras=extras, features={"edge": row.name}
        )


def batches(subject: Subject, example: Input) -> Judgement:
    """P11: a sequence gives the same bits alone, at any place of the batch, beside more, and again.

    Where that is not declared: what the contract allows, and the datasheet says so.
    """
    case = example.case
    whole = observe(subject, case)
    count = len(case.arrays["q"])
    found = [
        _compared(subject, case, whole, [n], f"sequence {n} alone and among {count}") for n in sorted({0, count - 1})
    ]
    turned = list(range(count))[::-1]
    found.append(_compared(subject, case, whole, turned, "the batch in reverse"))
    found.append(_compared(subject, case, whole, [*range(count), *turned], "the batch beside as much again"))
    for _ in range(3):
        found.append(_compared(subject, case, whole, list(range(count)), "another call"))
    return worst_of([*found, *_splits(subject, case, whole)])


def _splits(subject: Subject, case: Case, whole: Outputs) -> Iterator[Judgement]:
    """Where the number of splits is a parameter: any gives what the contract allows; they sum in other orders."""
    for count in (1, 2, 3, 8) if "num_splits" in subject.target.parameters else ():
        split = observe(with_parameters(subject, num_splits=count), case)
        yield agree_on(subject, case, whole, split, what=f"{count} splits and as many as the target likes")


def _compared(subject: Subject, case: Case, whole: Outputs, chosen: list[int], what: str) -> Judgement:
    other = of_sequences(case, chosen)
    first = {name: values[chosen] for name, values in whole.items()}
    second = observe(subject, other)
    return invariant(subject, first, second, lambda: agree_on(subject, other, first, second, what=what), what=what)


def of_sequences(case: Case, chosen: list[int]) -> Case:
    """The case with these sequences, in this order, with their own masks and slopes."""
    arrays = {name: array[chosen] for name, array in case.arrays.items()}
    return replace(case, arrays=arrays, options=taken(case.options, B=chosen))


def batch_edges(subject: Subject) -> Iterator[Input]:
    """Three sequences: decode and prefill, short and long keys, masks and slopes of their own."""
    for sq, sk, dims in ((1, 70, 64), (4, 33, 16), (1, 300, 32), (40, 40, 16)):
        yield strategies.attention_input(
            subject, batch=3, kv_heads=2, sq=sq, sk=sk, dims=dims, features={"edge": "batch"}
        )
    if subject.has("attn_mask"):
        yield strategies.attention_input(subject, batch=3, sq=3, sk=40, mask=Mask(), features={"edge": "masks"})
    for _, extras in alone(subject, "sequences"):
        yield strategies.attention_input(subject, batch=3, sq=3, sk=40, extras=extras, features={"edge": "slopes"})
