"""The diagnosis names what went wrong with a window, a soft cap, ALiBi or a sink, and keeps them in other guesses."""

from __future__ import annotations

from typing import Any

import pytest

from properties.diagnosis.engine import diagnose
from properties.inputs.recipes import Logits, Mask
from properties.inputs.strategies import attention_input
from properties.subject import PROFILES, subject_for
from targets.calling.registry import resolve
from targets.mutants.table import mutant_named

BUT_WINDOW = {"softcap": 5.0, "alibi_slopes": "heads", "sinks": 1.0}
ALL = {"window_size": (5, 1), **BUT_WINDOW}
CAPPED: dict[str, Any] = {"extras": {"softcap": 1.0}, "logits": Logits("ascending", 8.0)}
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("window_ignored", {"extras": {"window_size": (3, 1)}}, "the window were ignored"),
    ("window_without_right_end", {"extras": {"window_size": (3, 1)}}, "the window had no right end"),
    ("window_one_key_too_far", {"extras": {"window_size": (3, 1)}}, "the window reached one key further to the left"),
    ("window_one_key_short_in_decode", {"extras": {"window_size": (3, 1)}, "sq": 1},
     "the window ended one key early on the left"),
    ("softcap_ignored", CAPPED, "the soft cap were ignored"),
    ("softcap_after_mask", CAPPED | {"mask": Mask("additive")}, "the soft cap were applied after bias and ALiBi"),
    ("alibi_ignored", {"extras": {"alibi_slopes": "heads"}}, "ALiBi were ignored"),
    ("alibi_favours_far_keys", {"extras": {"alibi_slopes": "heads"}}, "ALiBi had the wrong sign"),
    ("slopes_of_head_zero", {"extras": {"alibi_slopes": "heads"}}, "all heads used the ALiBi slope of head 0"),
    ("slopes_of_first_sequence", {"extras": {"alibi_slopes": "sequences"}},
     "all sequences used the ALiBi slopes of the first"),
    ("sinks_ignored", {"extras": {"sinks": 1.0}}, "the sink were ignored"),
    ("sinks_of_head_zero", {"extras": {"sinks": 1.0}}, "all heads used the sink of head 0"),
    ("sink_scaled", {"extras": {"sinks": 2.0}}, "the sink were scaled as scores are"),
    ("sink_in_every_split", {"extras": {"sinks": 1.0}}, "the sink were counted 2 times"),
    ("lse_without_sink", {"extras": {"sinks": 1.0}}, "the LSE left the sink out"),
    # Defects that have nothing to do with the options are found beside them.
    ("gain_one_percent", {"extras": ALL}, "the output were 1% too large"),
    ("gqa_tiled", {"extras": ALL, "group": 2}, "KV heads were tiled (h mod Hkv) instead of repeated"),
    ("causal_sees_next_key", {"extras": BUT_WINDOW, "is_causal": True},
     "the causal mask let each query see one more key"),
    ("mask_inverted", {"extras": BUT_WINDOW, "mask": Mask()}, "the mask's True meant hidden"),
]  # fmt: skip


@pytest.mark.parametrize(("mutant", "given", "says"), [pytest.param(*case, id=case[0]) for case in CASES])
def test_a_defect_is_named(mutant: str, given: dict[str, Any], says: str) -> None:
    subject = subject_for(resolve(mutant_named(mutant).target), "fp32", profile=PROFILES["quick"])
    shape: dict[str, Any] = {"batch": 2, "kv_heads": 2, "sq": 9, "sk": 21, "dims": 16}
    case = attention_input(subject, **shape | given).case
    assert diagnose(subject, case, seconds=60.0) == f"as if {says}"


def test_an_honest_kernel_has_no_diagnosis() -> None:
    subject = subject_for(resolve("targets.honest.flash:attention"), "fp32", profile=PROFILES["quick"])
    assert diagnose(subject, attention_input(subject, sq=5, sk=9, extras=ALL).case) == ""
