"""The deterministic inputs of attention's properties: where implementations break, one list per property."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from oracle.case import Case
from properties.inputs import strategies
from properties.inputs.real_input import captured_layers, load_layer
from properties.inputs.recipes import OVER, Logits, Mask, Recipe
from properties.ops.attention import option_edges as option_lists
from properties.subject import Input, Subject


def context_sweep(subject: Subject) -> Iterator[Input]:
    """Few queries against ever more keys, to the profile's largest; plain, and with a sink and a needle."""
    longest = 512 if subject.target.interpreted else subject.profile.large
    sk = 64
    while sk <= longest:
        for kind, size in (("plain", 0.0), ("needle", float(np.log(sk)))):
            features = {"sweep": "context"}
            yield strategies.attention_input(
                subject, sq=8, sk=sk, dims=64, recipe=Recipe(seed=sk), logits=Logits(kind, size), features=features
            )
        sk *= 4


def captured(subject: Subject) -> Iterator[Input]:
    """Real activations of a trained model: causal attention of each captured layer, a query group at a time."""
    causal = subject.has("is_causal")
    for name in captured_layers():
        layer = load_layer(name)
        heads = 3 if subject.profile.name == "quick" or subject.target.interpreted else layer.q.shape[0]
        kv = max(1, heads // (layer.q.shape[0] // layer.k.shape[0]))
        heads = kv if strategies.refuses(subject, "grouped_heads") else heads
        rows = 64 if subject.target.interpreted else 256
        arrays = {
            "q": strategies.stored(layer.q[None, :heads, :rows].astype(np.float64), subject.fmt),
            "k": strategies.stored(layer.k[None, :kv, :rows].astype(np.float64), subject.fmt),
            "v": strategies.stored(layer.v[None, :kv, :rows].astype(np.float64), subject.fmt),
        }
        options = (
            {"is_causal": True, "causal_alignment": subject.conventions.get("causal_alignment", "top_left")}
            if causal
            else {}
        )
        mass = float(np.max(layer.sink_mass[:heads]))
        yield Input(
            Case("attention", arrays, options), {"real": name, "sink_mass": mass, "sk": rows, "recipe": "captured"}
        )


def accuracy_edges(subject: Subject) -> Iterator[Input]:
    yield from context_sweep(subject)
    yield from captured(subject)


LOGIT_SIZES = (1.0, 10.0, 30.0, 88.0, 100.0, 300.0, 1e3, 3e3, 1e4, 3e4, 1e5, 3e5, 1e6)


def logit_sweep(subject: Subject) -> Iterator[Input]:
    """Scores of growing size: common offsets of both signs, one peak, maxima that grow and fall along the keys."""
    sizes = LOGIT_SIZES if subject.profile.name != "quick" else LOGIT_SIZES[::3]
    for kind in ("offset", "ascending", "descending", "peak"):
        for size in sizes:
            for sign in (1.0, -1.0) if kind == "offset" else (1.0,):
                yield strategies.attention_input(
                    subject,
                    sq=4,
                    sk=96,
                    dims=32,
                    recipe=Recipe(seed=int(size) % 997),
                    logits=Logits(kind, sign * size),
                    features={"sweep": "logits", "logit_size": sign * size},
                )


def hidden_ranges(subject: Subject) -> Iterator[Input]:
    """Scores far from 0 in rows of which whole tiles are hidden, at either end: a 0 stored for those must not win."""
    for size in (-150.0, -1e3, 1e3):
        options: list[dict[str, Any]] = [{"is_causal": True}] if subject.has("is_causal") else []
        options += [{"mask": Mask("bool", hides)} for hides in ("first", "last") if subject.has("attn_mask")]
        for more in options:
            features = {"sweep": "hidden", "logit_size": size}
            yield strategies.attention_input(
                subject, sq=72, sk=72, dims=16, logits=Logits("offset", size), features=features, **more
            )


def near_overflow(subject: Subject) -> Iterator[Input]:
    """Inputs near the largest finite number of the dtype and among its subnormals, and those of published overflows.

    First, many values of one sign, each far from overflow, whose sum is not.
    """
    yield strategies.attention_input(
        subject,
        sq=2,
        sk=40,
        dims=16,
        recipe=Recipe("tiny", 1),
        values=Recipe("one_signed", 2, min(subject.fmt.max_finite / 8, 1e30)),
        features={"edge": "sums"},
    )
    fmt = subject.fmt
    for gain in (fmt.max_finite / 64, fmt.smallest_normal, 1330.0, 133120.0):
        value = min(gain, fmt.max_finite / 4)
        yield strategies.attention_input(
            subject,
            sq=2,
            sk=3,
            dims=64,
            recipe=Recipe("ones", 1, value),
            values=Recipe("normal", 2),
            features={"edge": "magnitude"},
        )
        yield strategies.attention_input(
            subject,
            sq=2,
            sk=5,
            dims=16,
            recipe=Recipe("tiny", 1),
            values=Recipe("normal", 3, value),
            features={"edge": "values"},
        )


def range_edges(subject: Subject) -> Iterator[Input]:
    yield from logit_sweep(subject)
    yield from hidden_ranges(subject)
    yield from near_overflow(subject)
    yield from option_lists.ranges(subject)


def shape_edges(subject: Subject) -> Iterator[Input]:
    """Both sides of tile borders, odd and single dimensions, Dv != D, Sq != Sk both ways."""
    tiles = (16, 32, 64, 128) if not subject.target.interpreted else (32, 64)
    sizes = [1, 2, 3] + [t + d for t in tiles for d in (-1, 0, 1)]
    for n in sizes:
        yield strategies.attention_input(subject, sq=1, sk=n, dims=16, recipe=Recipe(seed=n), features={"edge": "keys"})
        yield strategies.attention_input(
            subject, sq=n, sk=n, dims=16, recipe=Recipe(seed=n), is_causal=True, features={"edge": "square"}
        )
    for sq, sk in ((3, 128), (33, 65), (65, 33), (2, 1), (1, 257)):
        yield strategies.attention_input(subject, sq=sq, sk=sk, dims=24, is_causal=True, features={"edge": "sq != sk"})
    for dims in (1, 2, 3, 5, 15, 17, 33, 63, 65, 72, 96, 127, 128, 129, 192, 256):
        yield strategies.attention_input(
            subject, sq=3, sk=19, dims=dims, recipe=Recipe(seed=dims), features={"edge": "d"}
        )
    for dims, value_dims in ((16, 32), (64, 16), (40, 24)):
        yield strategies.attention_input(
            subject, sq=5, sk=33, dims=dims, value_dims=value_dims, features={"edge": "dv"}
        )
    for kv_heads, group in ((1, 8), (2, 4), (4, 2), (3, 1), (5, 3)):
        yield strategies.attention_input(
            subject, kv_heads=kv_heads, group=group, sq=3, sk=17, dims=8, features={"edge": "heads"}
        )
    yield from option_lists.shapes(subject)


def sink_sweep(subject: Subject) -> Iterator[Input]:
    """A first key with a stated share of the mass and small values, plain or with a few massive channels."""
    sk = 512 if not subject.target.interpreted else 128
    masses = (0.1, 0.5, 0.9, 0.99, 0.999)
    for mass in masses:
        size = float(np.log(mass / (1 - mass) * (sk - 1)))
        for recipe in ("normal", "massive_channels"):
            made = strategies.attention_input(
                subject,
                sq=8,
                sk=sk,
                dims=64,
                recipe=Recipe(recipe, int(1000 * mass), 0.1 if recipe == "normal" else 0.03),
                logits=Logits("sink", size),
                features={"sweep": "sink", "sink_mass": mass},
            )
            v = made.case.arrays["v"].astype(np.float64)
            v[..., 0, :] *= 0.01
            yield Input(made.case.with_arrays(v=subject.fmt.store(v)), made.features)


def needle_edges(subject: Subject) -> Iterator[Input]:
    """A needle at the far end behind a sink, at lengths around the tile borders and at a long context."""
    yield from sink_sweep(subject)
    longest = 256 if subject.target.interpreted else subject.profile.large
    for sk in (33, 65, 129, longest):
        yield strategies.attention_input(
            subject, sq=4, sk=sk, dims=64, logits=Logits("needle", float(np.log(sk)) + 1), features={"edge": "needle"}
        )


def option_edges(subject: Subject) -> Iterator[Input]:
    """Every option that the target has, at values far from its default."""
    common: dict[str, Any] = {"sq": 9, "sk": 21, "dims": 32}
    for scale in (1.0, 0.5, 0.01):
        yield strategies.attention_input(subject, scale=scale, **common)
    yield strategies.attention_input(subject, is_causal=True, **common)
    for kind in ("bool", "additive"):
        yield strategies.attention_input(subject, mask=Mask(kind), **common)
    yield from option_lists.matter(subject)


def dtype_edges(subject: Subject) -> Iterator[Input]:
    yield strategies.attention_input(subject, sq=2, sk=3, dims=16)


def exact_edges(subject: Subject) -> Iterator[Input]:
    """q = 0 and small integers in V: every weight is exactly 1/n, every sum exact."""
    for sk in (1, 2, 4, 16, 64, 128):
        yield strategies.attention_input(
            subject,
            sq=3,
            sk=sk,
            dims=16,
            recipe=Recipe("zeros"),
            values=Recipe("integers", sk),
            features={"edge": "exact"},
        )


def masks(subject: Subject, *hides: str) -> list[Mask]:
    """Masks that hide keys in these ways: boolean ones of every layout, one additive each; none if it takes none."""
    if not subject.has("attn_mask"):
        return []
    return [Mask("bool", way, over) for way in hides for over in OVER] + [Mask("additive", way) for way in hides]


def causal_shapes(subject: Subject, *shapes: tuple[int, int]) -> list[tuple[int, int]]:
    return list(shapes) if subject.has("is_causal") else []


def visibility_edges(subject: Subject) -> Iterator[Input]:
    """Causal cases of every alignment and on both sides of a tile; masks of every layout, two sequences of two heads.

    Rows whose first tiles are wholly hidden, whatever the tile; more keys than a mask may have been read for.
    """
    for sq, sk in causal_shapes(subject, (3, 7), (7, 3), (32, 32), (33, 33), (31, 64), (5, 70)):
        yield strategies.attention_input(subject, sq=sq, sk=sk, is_causal=True, features={"edge": "causal"})
    for mask in masks(subject, "some", "last"):
        yield strategies.attention_input(
            subject, batch=2, kv_heads=2, sq=4, sk=37, mask=mask, features={"edge": "mask layout"}
        )
    if subject.has("attn_mask"):
        for over in ("rows", "sequences"):
            mask = Mask("bool", "first", over)
            yield strategies.attention_input(subject, sq=3, sk=300, mask=mask, features={"edge": "hidden tiles"})
        for sk in (530, 1100):
            yield strategies.attention_input(subject, sq=3, sk=sk, mask=Mask(), features={"edge": "long mask"})
        if subject.has("is_causal"):
            yield strategies.attention_input(
                subject, sq=20, sk=37, is_causal=True, mask=Mask(), features={"edge": "causal and mask"}
            )
    yield from option_lists.windows(subject)


def hidden_edges(subject: Subject) -> Iterator[Input]:
    """Causal cases and masks of every layout, for what stands in keys that are not attended."""
    for sq, sk in causal_shapes(subject, (5, 5), (33, 65), (3, 40)):
        yield strategies.attention_input(subject, sq=sq, sk=sk, is_causal=True, features={"edge": "causal"})
    for mask in masks(subject, "some", "last"):
        yield strategies.attention_input(
            subject, batch=2, kv_heads=2, sq=4, sk=37, mask=mask, features={"edge": "mask"}
        )
    yield from option_lists.windows(subject)


def empty_edges(subject: Subject) -> Iterator[Input]:
    """Rows without a key among others, by masks and by causal masks that end before the first query."""
    if subject.conventions.get("causal_alignment") == "bottom_right":
        for sq, sk in causal_shapes(subject, (2, 1), (9, 3), (65, 33)):
            yield strategies.attention_input(subject, sq=sq, sk=sk, is_causal=True, features={"edge": "causal"})
    for mask in masks(subject, "rows"):
        if mask.over != "keys":
            yield strategies.attention_input(
                subject, batch=2, kv_heads=2, sq=5, sk=37, mask=mask, features={"edge": "empty rows"}
            )
    if subject.has("attn_mask"):
        for mask in (Mask("bool", "all", "keys"), Mask("additive", "all")):
            yield strategies.attention_input(subject, batch=2, sq=3, sk=40, mask=mask, features={"edge": "all empty"})
    yield from option_lists.empty(subject)


def equal_edges(subject: Subject) -> Iterator[Input]:
    """Long rows of equal scores, past the integers at which a low-precision sum stops to grow."""
    longest = 300 if subject.target.interpreted else subject.profile.large
    for sk in (n for n in (300, 700, 2500) if n <= longest):
        yield strategies.attention_input(subject, sq=2, sk=sk, recipe=Recipe("zeros"), features={"edge": "equal"})
    yield from option_lists.sums(subject)


def single_edges(subject: Subject) -> Iterator[Input]:
    """One key; masks that leave each row one; scores from tiny to huge."""
    for size in (0.0, 30.0, -2500.0, 1e5):
        yield strategies.attention_input(
            subject, sq=2, sk=1, logits=Logits("offset", size), features={"edge": "one key"}
        )
    for mask in masks(subject, "all but one"):
        yield strategies.attention_input(subject, sq=3, sk=37, mask=mask, features={"edge": "one visible key"})
    yield from option_lists.single(subject)


def part_edges(subject: Subject) -> Iterator[Input]:
    """Keys of growing and of equal scores; parts that some rows, or all, see nothing of."""
    yield strategies.attention_input(subject, sq=4, sk=96, features={"edge": "plain"})
    for kind, size in (("ascending", 5.0), ("offset", 300.0)):
        yield strategies.attention_input(subject, sq=4, sk=70, logits=Logits(kind, size), features={"edge": kind})
    for mask in masks(subject, "first", "some"):
        yield strategies.attention_input(
            subject, batch=2, kv_heads=2, sq=3, sk=40, mask=mask, features={"edge": "mask"}
        )
    for sq, sk in causal_shapes(subject, (9, 12), (12, 9), (40, 65)):
        yield strategies.attention_input(subject, sq=sq, sk=sk, is_causal=True, features={"edge": "causal"})
    yield from option_lists.parts(subject)


def lse_edges(subject: Subject) -> Iterator[Input]:
    """Scales that are no power of two, long rows of equal scores, one key, scores far from 0, rows without a key."""
    for sk in (1, 2, 33, 64):
        for dims in (16, 40):
            yield strategies.attention_input(
                subject, sq=3, sk=sk, dims=dims, recipe=Recipe(seed=sk), features={"edge": "plain"}
            )
    yield strategies.attention_input(subject, sq=3, sk=40, logits=Logits("offset", 30.0), features={"edge": "offset"})
    yield from equal_edges(subject)
    yield from empty_edges(subject)


def head_edges(subject: Subject) -> Iterator[Input]:
    """Ratios of heads that are square and not, two sequences, a mask for each head."""
    for kv_heads, group in ((1, 3), (2, 2), (2, 3), (3, 2), (4, 1)):
        for mask in (None, Mask("bool", "some", "heads")) if subject.has("attn_mask") else (None,):
            yield strategies.attention_input(
                subject, batch=2, kv_heads=kv_heads, group=group, sq=3, sk=17, mask=mask, features={"edge": "heads"}
            )
    yield from option_lists.heads(subject)


def purity_edges(subject: Subject) -> Iterator[Input]:
    """Lengths that fill their tiles and that leave room behind the last key."""
    for sq, sk in ((3, 37), (32, 32), (33, 64)):
        yield strategies.attention_input(subject, sq=sq, sk=sk, features={"edge": "lengths"})


def symmetry_edges(subject: Subject) -> Iterator[Input]:
    """Small integers, of which every format holds the product with 2^10 and 2^-10; plain numbers."""
    for recipe in (Recipe("integers", 1), Recipe("normal", 1)):
        yield strategies.attention_input(
            subject, kv_heads=2, sq=3, sk=33, recipe=recipe, features={"edge": recipe.family}
        )
