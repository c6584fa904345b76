"""Where an output is wrong: which outputs, batch entries, heads, rows and columns, if not everywhere."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oracle.bounds.rope.frequency import frequencies_upper
from oracle.ops.layouts.case import VARLEN
from oracle.ops.rope.case import pair_positions, rotation, sequence_length
from properties.diagnosis.counterfactual import FailingCase

Mask = NDArray[np.bool_]
# A run of indices counts as wrong from its start if at least this share of it is.
SHARE = 0.6
PERIODS = (2, 4, 8, 16, 32, 64, 128)
LISTED = 3
# Smaller angles need no range reduction to speak of.
LEAST_ANGLE = 1000.0


def where_wrong(failing: FailingCase) -> str:
    """Such as "wrong only in head 1, rows >= 32", else how much of the output is wrong."""
    if any(judged.block.outputs is not None for judged in failing.blocks):
        return _by_output(failing)
    parts = []
    names = [n for n in failing.blocks[0].wrong if any(judged.wrong[n].any() for judged in failing.blocks)]
    if len(failing.blocks[0].wrong) > 1 and len(names) == 1:
        parts.append({"lse": "the LSE", "out": "the output, not the LSE"}.get(names[0], names[0]))
    parts += _axes(failing, names)
    if (angle := _least_angle(failing)) is not None:
        return f"wrong only in pairs that turn by {angle:.4g} radians or more"
    text = f"wrong only in {', '.join(parts)}" if parts else _share(failing, names)
    special = _not_finite(failing, names)
    return "; ".join(t for t in (text, special) if t)


def _by_output(failing: FailingCase) -> str:
    """Of outputs whose rows are of different kinds: which are wrong, and in which rows where that is not all."""
    said, right = [], []
    for name in failing.outputs:
        held = [(b.block.rows, b.wrong[name].any(axis=1)) for b in failing.blocks if name in b.wrong]
        rows = np.unique(np.concatenate([rows for rows, _ in held]))
        wrong = np.unique(np.concatenate([rows[bad] for rows, bad in held])).tolist()
        if not wrong:
            right.append(name)
        elif len(wrong) == len(rows):
            said.append(f"{name} (all rows)")
        else:
            said.append(f"{name} ({f'rows {wrong[0]} to {wrong[-1]}' if len(wrong) > 1 else f'row {wrong[0]}'})")
    return f"wrong in {', '.join(said)}" + (f"; right in {', '.join(right)}" if right else "")


def _share(failing: FailingCase, names: list[str]) -> str:
    masks = [judged.wrong[n] for judged in failing.blocks for n in names]
    bad, total = sum(int(m.sum()) for m in masks), sum(m.size for m in masks)
    return "wrong everywhere" if bad == total else f"wrong in {bad} of {total} elements, of all rows and columns"


def _axes(failing: FailingCase, names: list[str]) -> list[str]:
    keys = [judged.block.key for judged in failing.blocks]
    bad = [any(judged.wrong[n].any() for n in names) for judged in failing.blocks]
    parts = []
    packed = failing.case.op == VARLEN
    names_of = (("sequence", "sequences") if packed else ("batch entry", "batch entries"), ("head", "heads"))
    for axis, (word, words) in enumerate(names_of[: len(keys[0])]):
        all_of = sorted({key[axis] for key in keys})
        wrong = sorted({key[axis] for key, b in zip(keys, bad, strict=True) if b})
        parts.append(pattern(wrong, all_of, word, words))
    rows = np.unique(np.concatenate([judged.block.rows for judged in failing.blocks]))
    wrong_rows = np.unique(
        np.concatenate([judged.block.rows[_any_column(judged.wrong, names)] for judged in failing.blocks])
    )
    empty = all(bool(judged.block.empty[_any_column(judged.wrong, names)].all()) for judged in failing.blocks)
    everything = all(bool(judged.block.empty.all()) for judged in failing.blocks)
    if empty and not everything:
        parts.append("rows without a visible key")
    else:
        parts.append(pattern(wrong_rows.tolist(), rows.tolist(), "row", "rows"))
    wide = [n for n in names if failing.blocks[0].wrong[n].shape[1] > 1]
    if wide and not empty:
        columns = np.any([judged.wrong[wide[0]].any(axis=0) for judged in failing.blocks], axis=0)
        parts.append(pattern(np.flatnonzero(columns).tolist(), list(range(len(columns))), "column", "columns"))
    return [p for p in parts if p]


def _any_column(wrong: dict[str, Mask], names: list[str]) -> Mask:
    return np.asarray(np.any([wrong[n].any(axis=1) for n in names], axis=0))


def _least_angle(failing: FailingCase) -> float | None:
    """rope: the angle from which on pairs are wrong, if there is one and smaller ones are right."""
    if failing.case.op not in ("rope", "rope_backward"):
        return None
    how = rotation(failing.case)
    pairs = how.rotary_dim // 2
    column = np.arange(how.rotary_dim)
    pair = column % pairs if how.layout == "half" else column // 2
    angles, wrong = [], []
    for judged in failing.blocks:
        at = np.abs(pair_positions(failing.case, judged.block.key, judged.block.rows).astype(np.float64))
        length = sequence_length(failing.case, judged.block.key)
        turned = at * frequencies_upper(how.base, how.rotary_dim, how.scaling, length)
        angles.append(turned[:, pair].ravel())
        wrong.append(judged.wrong[failing.main][:, : how.rotary_dim].ravel())
    angle, bad = np.concatenate(angles), np.concatenate(wrong)
    if not bad.any() or angle[bad].min() < LEAST_ANGLE:
        return None
    least = float(angle[bad].min())
    beyond = angle >= least
    return least if bad[beyond].mean() >= SHARE and not beyond.all() else None


def _not_finite(failing: FailingCase, names: list[str]) -> str:
    bad = total = 0
    for judged in failing.blocks:
        for n in names:
            mask = judged.wrong[n]
            total += int(mask.sum())
            bad += int((mask & ~np.isfinite(judged.values[n])).sum())
    return "inf or NaN wherever it is wrong" if bad == total and bad else ""


def pattern(wrong: list[int], every: list[int], one: str, many: str) -> str:
    """The indices in ``wrong`` among ``every`` (both ascending), in words; empty if they are all, or follow no rule."""
    if len(wrong) == len(every) or not wrong or len(every) < 2:
        return ""
    if len(wrong) == 1:
        place = wrong[0]
        if one in ("row", "column") and place in (every[0], every[-1]) and len(every) > 2:
            return f"the {'first' if place == every[0] else 'last'} {one}"
        return f"{one} {place}"
    start, stop = wrong[0], wrong[-1]
    inside = [i for i in every if start <= i <= stop]
    dense = len(wrong) >= SHARE * len(inside)
    if dense and start > every[0]:
        return f"{many} >= {start}" if stop == every[-1] else f"{many} {start} .. {stop}"
    if dense and stop < every[-1] and len(wrong) > LISTED:
        return f"{many} <= {stop}"
    for period in PERIODS:
        residues = {i % period for i in wrong}
        alike = [i for i in every if i % period in residues]
        if len(residues) == 1 and len(wrong) >= max(2, SHARE * len(alike)) and len(alike) < len(every):
            return f"{many} {residues.pop()} modulo {period}"
    return f"{many} {', '.join(map(str, wrong))}" if len(wrong) <= LISTED else ""
