"""The properties of attention: what is checked, on which inputs. One row each in `PROPERTIES`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from hypothesis import strategies as st

from oracle.ops.attention.options import ROWS, RULES
from properties.checks import bias, dropout, model_gate
from properties.inputs import strategies
from properties.judge.judgements import options_matter, structure_only, within_bound
from properties.judge.pipeline import certify
from properties.judge.verdict import Judgement
from properties.ops.attention import edges, relations, state, views
from properties.ops.attention.heads import heads_alone
from properties.ops.attention.merge import split_merge
from properties.ops.attention.options import NAMES, TABLE, held
from properties.property import Property
from properties.subject import Input, Subject


def lse_within_bound(subject: Subject, example: Input) -> Judgement:
    """P8: the log-sum-exp within its bound, in the stated base and layout."""
    return certify(subject, example.case, outputs=("lse",))


def _general(subject: Subject) -> st.SearchStrategy[Input]:
    return strategies.attention(subject)


def _ranges(subject: Subject) -> st.SearchStrategy[Input]:
    kinds = ("offset", "ascending", "descending", "peak", "ties", "needle")
    return strategies.attention(subject, kinds=kinds, sizes=(10.0, -60.0, 100.0, 1e3, -1e4, 1e5, 1e6), largest_q=8)


def _excluding(subject: Subject) -> st.SearchStrategy[Input]:
    choices = []
    if subject.has("is_causal"):
        choices.append(strategies.attention(subject, causal=True))
    if subject.has("attn_mask"):
        choices.append(strategies.attention(subject, causal=False, mask=True))
    rules = [name for name in RULES if name in NAMES]
    if held(subject, rules):
        choices.append(strategies.attention(subject, mask=False, options=rules, one=True))
    return st.one_of(choices)


def _splitting(subject: Subject) -> st.SearchStrategy[Input]:
    return strategies.attention(subject, options=[name for name in NAMES if ROWS[name].parts != "none"])


def _plain(subject: Subject) -> st.SearchStrategy[Input]:
    return strategies.attention(subject, causal=False, mask=False, options=[row.name for row in TABLE if row.symmetric])


def _one_key(subject: Subject) -> st.SearchStrategy[Input]:
    return strategies.attention(
        subject, largest_k=1, largest_q=4, kinds=("plain", "offset"), sizes=(0.0, 100.0, -2500.0, 1e5)
    )


def _grouped(subject: Subject) -> st.SearchStrategy[Input]:
    # A target that refuses grouped heads is still asked, so that the record says so.
    free = replace(subject, conventions={**subject.conventions, "grouped_heads": "accepted"})
    return strategies.attention(free, grouped=True, largest_k=48)


def _sinks(subject: Subject) -> st.SearchStrategy[Input]:
    return strategies.attention(
        subject, kinds=("sink", "needle"), sizes=(2.0, 4.0, 7.0, 12.0), families=("normal", "massive_channels")
    )


def _optional(subject: Subject) -> st.SearchStrategy[Input]:
    return strategies.attention(subject, scale=subject.has("scale"), largest_q=16, largest_k=48, one=True)


EXCLUSION, LSE = frozenset({"exclusion"}), frozenset({"lse"})

PROPERTIES: tuple[Property, ...] = (
    Property("P1", "error within the contract's bound", within_bound, search=_general, edges=edges.accuracy_edges),
    Property(
        "P2",
        "content of keys that are not attended is irrelevant; a used NaN reaches the output",
        relations.irrelevant_content,
        search=_excluding,
        edges=edges.hidden_edges,
        needs=EXCLUSION,
    ),
    Property(
        "P3",
        "rows without a key follow the stated convention, the others do not notice",
        within_bound,
        edges=edges.empty_edges,
        needs=EXCLUSION,
    ),
    Property(
        "P4",
        "a key changes exactly the rows that may attend to it",
        relations.reachability,
        search=_excluding,
        edges=edges.visibility_edges,
        needs=EXCLUSION,
    ),
    Property(
        "P5",
        "weights are convex: V = 1 gives 1, O stays in the hull of V",
        relations.partition_of_unity,
        search=_general,
        edges=edges.equal_edges,
    ),
    Property("P6", "one visible key gives its V row", within_bound, search=_one_key, edges=edges.single_edges),
    Property(
        "P7", "parts merged by LSE equal the whole", split_merge, search=_splitting, edges=edges.part_edges, needs=LSE
    ),
    Property("P8", "LSE within its bound", lse_within_bound, search=_general, edges=edges.lse_edges, needs=LSE),
    Property(
        "P9",
        "logits from -1e6 to 1e6, values near the dtype's limits",
        within_bound,
        search=_ranges,
        edges=edges.range_edges,
    ),
    Property(
        "P10",
        "token by token and in chunks as all at once",
        state.decode,
        edges=state.decode_edges,
        needs=frozenset({"is_causal"}),
    ),
    Property("P11", "a sequence gives the same whatever is computed beside it", state.batches, edges=state.batch_edges),
    Property(
        "P12",
        "how inputs lie in memory does not matter",
        partial(views.through, ways=views.LAYOUTS),
        edges=views.layout_edges,
    ),
    Property(
        "P13",
        "heads are independent: each gives what it gives alone, grouped KV heads equal repeated ones",
        heads_alone,
        search=_grouped,
        edges=edges.head_edges,
    ),
    Property(
        "P15",
        "no side effects, no influence of the memory around, independent calls",
        relations.purity,
        search=_general,
        edges=edges.purity_edges,
    ),
    Property(
        "P17",
        "every option matters and matches the oracle",
        options_matter,
        search=_optional,
        edges=edges.option_edges,
    ),
    Property("P18", "shapes around tile borders, odd and unequal dimensions", within_bound, edges=edges.shape_edges),
    Property("P19", "errors have no direction, with and without ties of the maximum", bias.check, edges=bias.edges),
    Property("P20", "elements beyond 2^31 are found", partial(views.through, ways=views.FAR), edges=views.far_edges),
    Property(
        "P22",
        "dropout keeps the mean, follows its seed, and is off where it should be",
        dropout.dropout,
        edges=dropout.edges,
        needs=frozenset({"dropout_p"}),
    ),
    Property("P23", "dtype, shape and device of the outputs", structure_only, edges=edges.dtype_edges),
    Property(
        "P25",
        "permuted and duplicated keys, scaling by powers of two",
        relations.symmetries,
        search=_plain,
        edges=edges.symmetry_edges,
    ),
    Property("P27", "attention sinks and needles", within_bound, search=_sinks, edges=edges.needle_edges),
    Property(
        "P28", "exactly representable inputs give exact results", relations.exact_arithmetic, edges=edges.exact_edges
    ),
    Property("G3", "rms error against the model kernel of the contract", model_gate.check, edges=model_gate.edges),
)
