"""The deterministic inputs of attention's properties for its options, alone and together; none for who lacks them.

`properties.ops.attention.edges` joins them to the lists of the properties.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from oracle.ops.attention.options import COUNTED_ONCE
from properties.inputs import strategies
from properties.inputs.recipes import Logits, Mask, Recipe
from properties.ops.attention.options import NAMES, Extras, alone, held, together
from properties.subject import Input, Subject


def _made(subject: Subject, edge: str, extras: Extras, **shape: Any) -> Input:
    return strategies.attention_input(subject, extras=extras, features={"edge": edge}, **shape)


def matter(subject: Subject) -> Iterator[Input]:
    """P17: each option alone at values far from none, then options whose order or interplay is a decision."""
    common: dict[str, Any] = {"sq": 9, "sk": 21, "dims": 32, "kv_heads": 2, "batch": 2}
    for row, extras in alone(subject, "matter"):
        yield _made(subject, row.name, extras, logits=Logits("ascending", row.felt), **common)
    if subject.has("softcap"):
        for more in combined(subject):
            yield _made(subject, "cap and bias", {"softcap": 2.0}, **common, **more)
        if subject.has("alibi_slopes"):
            yield _made(subject, "cap and alibi", {"softcap": 2.0, "alibi_slopes": "heads"}, **common)
    if subject.has("sinks"):
        for more in combined(subject):
            yield _made(subject, "sink and bias", {"sinks": 1.0}, **common, **more)
    if len(held(subject)) > 1:
        yield _made(subject, "all options", together("all"), scale=1.0, **common)


def combined(subject: Subject) -> list[dict[str, Any]]:
    """What else says which scores enter: an additive mask, a causal one with an additive one, a boolean one."""
    masks = [{"mask": Mask("additive")}, {"mask": Mask("bool", "last")}] if subject.has("attn_mask") else []
    return [*masks, {"is_causal": True}] if subject.has("is_causal") else list(masks)


def windows(subject: Subject) -> Iterator[Input]:
    """P2, P4: windows in prefill and decode, narrower than a tile, as wide, and wider; both ends, either, alone."""
    if not subject.has("window_size"):
        return
    for sq, sk, window in (
        (7, 7, (2, 0)), (7, 7, (0, 0)), (7, 7, (1, 2)), (7, 7, (-1, 1)), (5, 9, (2, -1)), (9, 5, (2, 1)),
        (33, 33, (31, 0)), (33, 65, (32, 1)), (40, 72, (5, 33)),
        (1, 9, (3, 0)), (1, 40, (31, 0)), (1, 70, (32, 0)), (2, 70, (3, 2)),
    ):  # fmt: skip
        edge = "decode window" if sq == 1 else "window"
        yield _made(subject, edge, {"window_size": window}, sq=sq, sk=sk)
    if subject.has("is_causal"):
        yield _made(subject, "causal window", {"window_size": (3, 2)}, sq=20, sk=37, is_causal=True)
    if subject.has("attn_mask"):
        yield _made(subject, "masked window", {"window_size": (9, 9)}, sq=20, sk=37, mask=Mask("bool"))
    if subject.has("sinks"):
        yield _made(subject, "window and sink", {"window_size": (2, 0), "sinks": 1.0}, kv_heads=2, sq=33, sk=37)


def empty(subject: Subject) -> Iterator[Input]:
    """P3: rows that no key of their window exists for, at either end of the rows; with a sink such rows have a sum."""
    found: list[tuple[int, int, Extras]] = []
    if subject.has("window_size"):
        found += [(9, 3, {"window_size": (1, 1)}), (70, 33, {"window_size": (2, 2)}), (5, 2, {"window_size": (0, 0)})]
        if subject.has("sinks"):
            found.append((9, 3, {"window_size": (1, 1), "sinks": -2.0}))
    for sq, sk, extras in found:
        yield _made(subject, "window past the keys", extras, kv_heads=2, sq=sq, sk=sk)
    if subject.has("sinks") and subject.has("attn_mask"):
        yield _made(subject, "sink alone", {"sinks": 1.0}, kv_heads=2, sq=5, sk=37, mask=Mask("bool", "rows"))


def single(subject: Subject) -> Iterator[Input]:
    """P6: windows of one key."""
    if subject.has("window_size"):
        left = 1 if subject.conventions.get("window_left") == "excluded" else 0
        for sq, sk in ((3, 3), (33, 40), (1, 70)):
            yield _made(subject, "window of one key", {"window_size": (left, 0)}, sq=sq, sk=sk)


def parts(subject: Subject) -> Iterator[Input]:
    """P7: a sink that one part counts, above the scores and below; capped scores; windows that part them."""
    if subject.has("sinks"):
        for sink in (0.5, 6.0, -4.0):
            yield _made(subject, "sink", {"sinks": sink}, kv_heads=2, sq=4, sk=70)
    if subject.has("softcap"):
        yield _made(subject, "cap", {"softcap": 3.0}, sq=4, sk=70, logits=Logits("ascending", 30.0))
    if subject.has("window_size"):
        yield _made(subject, "window", {"window_size": (3, 0)}, sq=9, sk=12)


def sums(subject: Subject) -> Iterator[Input]:
    """P5, P8: the options of which a row's sum knows; scores far from 0 on either side of a sink."""
    for row, extras in alone(subject, "sums", names=NAMES[::-1]):
        yield _made(subject, row.name, extras, batch=2, kv_heads=2, sq=3, sk=40)
    if subject.has("sinks"):
        for size in (40.0, -40.0):
            yield _made(subject, "far sink", {"sinks": 1.0}, sq=3, sk=40, logits=Logits("offset", size))


def ranges(subject: Subject) -> Iterator[Input]:
    """P9: capped scores far beyond the cap; a sink far above, far below and beside scores of any size."""
    if subject.has("softcap"):
        for kind, size in (("peak", 1e3), ("offset", 1e5), ("ascending", -3e4), ("descending", 300.0)):
            yield _made(subject, "huge under a cap", {"softcap": 30.0}, sq=4, sk=70, logits=Logits(kind, size))
    if subject.has("sinks"):
        for sink, size in ((100.0, 0.0), (-100.0, 0.0), (1e4, 9990.0), (-1e4, -1e4), (0.0, 300.0), (0.0, -300.0)):
            kind = "offset" if size else "plain"
            yield _made(subject, "sink far off", {"sinks": sink}, sq=4, sk=70, logits=Logits(kind, size))
    if subject.has("alibi_slopes"):
        yield _made(subject, "far keys", {"alibi_slopes": "heads"}, kv_heads=2, sq=2, sk=700)


def heads(subject: Subject) -> Iterator[Input]:
    """P13: parameters by head and by sequence, at every index, with grouped and with equal KV heads."""
    grouped = strategies.refuses(subject, "grouped_heads")
    for kv_heads, group in ((3, 1), (5, 1)) if grouped else ((1, 4), (2, 3), (5, 1)):
        for _, extras in alone(subject, "heads", names=sorted(NAMES, key=lambda name: name not in COUNTED_ONCE)):
            yield _made(subject, "by head", extras, batch=3, kv_heads=kv_heads, group=group, sq=3, sk=17)


def shapes(subject: Subject) -> Iterator[Input]:
    """P18: windows that end at both sides of a tile's border, from one query and from as many as keys; options of one
    query and key."""
    if subject.has("window_size"):
        for left in (14, 15, 16, 30, 31, 32, 33, 63, 64):
            yield _made(subject, "window", {"window_size": (left, 0)}, sq=1, sk=130, recipe=Recipe(seed=left))
            yield _made(subject, "window", {"window_size": (left, 1)}, sq=70, sk=70, recipe=Recipe(seed=left))
    for sq, sk in ((1, 1), (1, 33), (33, 1)) if held(subject) else ():
        yield _made(subject, "all options", together("small"), kv_heads=2, sq=sq, sk=sk)
