"""The properties of attention: what is checked, on which inputs. One row each in `PROPERTIES`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from properties import attention_relations as relations
from properties import model_gate, strategies
from properties.bench import Bench, Input
from properties.metamorphic import Unobserved
from properties.pipeline import certify, structure
from properties.property import Check, Property
from properties.real_input import captured_layers, load_layer
from properties.recipes import Logits, Recipe
from properties.verdict import Basis, Judgement, Verdict, worst_of
from oracle.case import Case


def _guarded(check: Check) -> Check:
    def run(bench: Bench, given: Input) -> Judgement:
        try:
            return check(bench, given)
        except Unobserved as failed:
            return failed.judgement

    return run


def within_bound(bench: Bench, given: Input) -> Judgement:
    """P1, P9, P18, P27: every output within the bound derived from the contract."""
    return certify(bench, given.case)


def lse_within_bound(bench: Bench, given: Input) -> Judgement:
    """P8: the log-sum-exp within its bound, in the stated base and layout."""
    return certify(bench, given.case, outputs=("lse",))


def structure_only(bench: Bench, given: Input) -> Judgement:
    """P23: dtype, shape and device of the outputs."""
    return structure(bench, given.case, bench.call(given.case)) or Judgement(
        Verdict.PASS, Basis.EXACT, "dtype and shape as stated"
    )


# --- edge inputs -------------------------------------------------------------------------------------------------------------


def context_sweep(bench: Bench) -> Iterator[Input]:
    """Few queries against ever more keys, to the profile's largest; plain, and with a sink and a needle."""
    longest = 512 if bench.target.interpreted else bench.profile.large
    sk = 64
    while sk <= longest:
        for kind, size in (("plain", 0.0), ("needle", float(np.log(sk)))):
            features = {"sweep": "context"}
            yield strategies.attention_input(
                bench, sq=8, sk=sk, dims=64, recipe=Recipe(seed=sk), logits=Logits(kind, size), features=features
            )
        sk *= 4


def captured(bench: Bench) -> Iterator[Input]:
    """Real activations of a trained model: causal attention of each captured layer, a query group at a time."""
    causal = bench.has("is_causal")
    for name in captured_layers():
        layer = load_layer(name)
        heads = 3 if bench.profile.name == "quick" or bench.target.interpreted else layer.q.shape[0]
        kv = max(1, heads // (layer.q.shape[0] // layer.k.shape[0]))
        heads = kv if strategies.refuses(bench, "grouped_heads") else heads
        rows = 64 if bench.target.interpreted else 256
        arrays = {
            "q": bench.fmt.store(layer.q[None, :heads, :rows].astype(np.float64)),
            "k": bench.fmt.store(layer.k[None, :kv, :rows].astype(np.float64)),
            "v": bench.fmt.store(layer.v[None, :kv, :rows].astype(np.float64)),
        }
        options = (
            {"is_causal": True, "causal_alignment": bench.conventions.get("causal_alignment", "top_left")}
            if causal
            else {}
        )
        mass = float(np.max(layer.sink_mass[:heads]))
        yield Input(
            Case("attention", arrays, options), {"real": name, "sink_mass": mass, "sk": rows, "recipe": "captured"}
        )


def accuracy_edges(bench: Bench) -> Iterator[Input]:
    yield from context_sweep(bench)
    yield from captured(bench)


LOGIT_SIZES = (1.0, 10.0, 30.0, 88.0, 100.0, 300.0, 1e3, 3e3, 1e4, 3e4, 1e5, 3e5, 1e6)


def logit_sweep(bench: Bench) -> Iterator[Input]:
    """Scores of growing size: common offsets of both signs, one peak, maxima that grow and fall along the keys."""
    sizes = LOGIT_SIZES if bench.profile.name != "quick" else LOGIT_SIZES[::3]
    for kind in ("offset", "ascending", "descending", "peak"):
        for size in sizes:
            for sign in (1.0, -1.0) if kind == "offset" else (1.0,):
                yield strategies.attention_input(
                    bench,
                    sq=4,
                    sk=96,
                    dims=32,
                    recipe=Recipe(seed=int(size) % 997),
                    logits=Logits(kind, sign * size),
                    features={"sweep": "logits", "logit_size": sign * size},
                )


def near_overflow(bench: Bench) -> Iterator[Input]:
    """Inputs near the largest finite number of the dtype and among its subnormals, and values of the first overflow reports."""
    fmt = bench.fmt
    for gain in (fmt.max_finite / 64, fmt.smallest_normal, 1330.0, 133120.0):
        value = min(gain, fmt.max_finite / 4)
        yield strategies.attention_input(
            bench,
            sq=2,
            sk=3,
            dims=64,
            recipe=Recipe("ones", 1, value),
            values=Recipe("normal", 2),
            features={"edge": "magnitude"},
        )
        yield strategies.attention_input(
            bench,
            sq=2,
            sk=5,
            dims=16,
            recipe=Recipe("tiny", 1),
            values=Recipe("normal", 3, value),
            features={"edge": "values"},
        )


def range_edges(bench: Bench) -> Iterator[Input]:
    yield from logit_sweep(bench)
    yield from near_overflow(bench)


def shape_edges(bench: Bench) -> Iterator[Input]:
    """Both sides of tile borders, odd and single dimensions, Dv != D, Sq != Sk both ways."""
    tiles = (16, 32, 64, 128) if not bench.target.interpreted else (32, 64)
    sizes = [1, 2, 3] + [t + d for t in tiles for d in (-1, 0, 1)]
    for n in sizes:
        yield strategies.attention_input(bench, sq=1, sk=n, dims=16, recipe=Recipe(seed=n), features={"edge": "keys"})
        yield strategies.attention_input(
            bench, sq=n, sk=n, dims=16, recipe=Recipe(seed=n), is_causal=True, features={"edge": "square"}
        )
    for sq, sk in ((3, 128), (33, 65), (65, 33), (2, 1), (1, 257)):
        yield strategies.attention_input(bench, sq=sq, sk=sk, dims=24, is_causal=True, features={"edge": "sq != sk"})
    for dims in (1, 2, 3, 5, 15, 17, 33, 63, 65, 72, 96, 127, 128, 129, 192, 256):
        yield strategies.attention_input(
            bench, sq=3, sk=19, dims=dims, recipe=Recipe(seed=dims), features={"edge": "d"}
        )
    for dims, value_dims in ((16, 32), (64, 16), (40, 24)):
        yield strategies.attention_input(bench, sq=5, sk=33, dims=dims, value_dims=value_dims, features={"edge": "dv"})
    for kv_heads, group in ((1, 8), (2, 4), (4, 2), (3, 1), (5, 3)):
        yield strategies.attention_input(
            bench, kv_heads=kv_heads, group=group, sq=3, sk=17, dims=8, features={"edge": "heads"}
        )


def sink_sweep(bench: Bench) -> Iterator[Input]:
    """A first key that takes a stated share of the mass, with small values, and massive activations in a few channels."""
    sk = 512 if not bench.target.interpreted else 128
    masses = (0.1, 0.5, 0.9, 0.99, 0.999)
    for mass in masses:
        size = float(np.log(mass / (1 - mass) * (sk - 1)))
        for recipe in ("normal", "massive_channels"):
            made = strategies.attention_input(
                bench,
                sq=8,
                sk=sk,
                dims=64,
                recipe=Recipe(recipe, int(1000 * mass), 0.1 if recipe == "normal" else 0.03),
                logits=Logits("sink", size),
                features={"sweep": "sink", "sink_mass": mass},
            )
            v = made.case.arrays["v"].astype(np.float64)
            v[..., 0, :] *= 0.01
            yield Input(made.case.with_arrays(v=bench.fmt.store(v)), made.features)


def needle_edges(bench: Bench) -> Iterator[Input]:
    """A needle at the far end behind a sink, at lengths around the tile borders and at a long context."""
    yield from sink_sweep(bench)
    longest = 256 if bench.target.interpreted else bench.profile.large
    for sk in (33, 65, 129, longest):
        yield strategies.attention_input(
            bench, sq=4, sk=sk, dims=64, logits=Logits("needle", float(np.log(sk)) + 1), features={"edge": "needle"}
        )


def option_edges(bench: Bench) -> Iterator[Input]:
    """Every option that the target has, at values far from its default."""
    common = {"sq": 9, "sk": 21, "dims": 32}
    for scale in (1.0, 0.5, 0.01):
        yield strategies.attention_input(bench, scale=scale, **common)
    yield strategies.attention_input(bench, is_causal=True, **common)
    for mask in ("bool", "additive"):
        yield strategies.attention_input(bench, mask=mask, **common)


def dtype_edges(bench: Bench) -> Iterator[Input]:
    yield strategies.attention_input(bench, sq=2, sk=3, dims=16)


def exact_edges(bench: Bench) -> Iterator[Input]:
    """q = 0 and small integers in V: every weight is exactly 1/n, every sum exact."""
    for sk in (1, 2, 4, 16, 64, 128):
        yield strategies.attention_input(
            bench,
            sq=3,
            sk=sk,
            dims=16,
            recipe=Recipe("zeros"),
            values=Recipe("integers", sk),
            features={"edge": "exact"},
        )


# --- searches ----------------------------------------------------------------------------------------------------------------


def _general(bench: Bench) -> st.SearchStrategy[Input]:
    return strategies.attention(bench)


def _ranges(bench: Bench) -> st.SearchStrategy[Input]:
    kinds = ("offset", "ascending", "descending", "peak", "ties", "needle")
    return strategies.attention(bench, kinds=kinds, sizes=(10.0, -60.0, 100.0, 1e3, -1e4, 1e5, 1e6), largest_q=8)


def _causal_or_masked(bench: Bench) -> st.SearchStrategy[Input]:
    causal = bench.has("is_causal")
    return strategies.attention(bench, causal=causal, mask=not causal)


def _excluding(bench: Bench) -> st.SearchStrategy[Input]:
    choices = []
    if bench.has("is_causal"):
        choices.append(strategies.attention(bench, causal=True))
    if bench.has("attn_mask"):
        choices.append(strategies.attention(bench, causal=False, mask=True))
    return st.one_of(choices)


def _plain(bench: Bench) -> st.SearchStrategy[Input]:
    return strategies.attention(bench, causal=False, mask=False)


def _one_key(bench: Bench) -> st.SearchStrategy[Input]:
    return strategies.attention(
        bench, largest_k=1, largest_q=4, kinds=("plain", "offset"), sizes=(0.0, 100.0, -2500.0, 1e5)
    )


def _grouped(bench: Bench) -> st.SearchStrategy[Input]:
    # A target that refuses grouped heads is still asked, so that the record says so.
    free = replace(bench, conventions={**bench.conventions, "grouped_heads": "accepted"})
    return strategies.attention(free, grouped=True, largest_k=48)


def _sinks(bench: Bench) -> st.SearchStrategy[Input]:
    return strategies.attention(
        bench, kinds=("sink", "needle"), sizes=(2.0, 4.0, 7.0, 12.0), families=("normal", "massive_channels")
    )


def _optional(bench: Bench) -> st.SearchStrategy[Input]:
    return strategies.attention(bench, scale=bench.has("scale"), largest_q=16, largest_k=48)


def _row(id: str, title: str, check: Check, **more: object) -> Property:
    return Property(id, title, "attention", _guarded(check), **more)  # type: ignore[arg-type]


PROPERTIES: tuple[Property, ...] = (
    _row("P1", "error within the contract's bound", within_bound, search=_general, edges=accuracy_edges),
    _row(
        "P2",
        "content of keys that are not attended is irrelevant; a used NaN reaches the output",
        relations.irrelevant_content,
        search=_excluding,
        needs=frozenset({"exclusion"}),
    ),
    _row(
        "P4",
        "a key changes exactly the rows that may attend to it",
        relations.reachability,
        search=_causal_or_masked,
        needs=frozenset({"exclusion"}),
    ),
    _row(
        "P5",
        "weights are convex: V = 1 gives 1, O stays in the hull of V",
        relations.partition_of_unity,
        search=_general,
    ),
    _row("P6", "one visible key gives its V row", relations.single_key, search=_one_key),
    _row("P7", "parts merged by LSE equal the whole", relations.split_merge, search=_plain, needs=frozenset({"lse"})),
    _row("P8", "LSE within its bound", lse_within_bound, search=_general, needs=frozenset({"lse"})),
    _row(
        "P9", "logits from -1e6 to 1e6, values near the dtype's limits", within_bound, search=_ranges, edges=range_edges
    ),
    _row("P13", "grouped heads equal explicit repetition", relations.grouping, search=_grouped),
    _row("P15", "no side effects, same answer on a second call", relations.purity, search=_general),
    _row(
        "P17",
        "every option matters and matches the oracle",
        relations.options_matter,
        search=_optional,
        edges=option_edges,
    ),
    _row("P18", "shapes around tile borders, odd and unequal dimensions", within_bound, edges=shape_edges),
    _row("P23", "dtype, shape and device of the outputs", structure_only, edges=dtype_edges),
    _row("P25", "permuted and duplicated keys, scaling by powers of two", relations.symmetries, search=_plain),
    _row("P27", "attention sinks and needles", within_bound, search=_sinks, edges=needle_edges),
    _row("P28", "exactly representable inputs give exact results", relations.exact_arithmetic, edges=exact_edges),
    _row("G3", "rms error against the model kernel of the contract", model_gate.check, edges=model_gate.edges),
)
