"""The diagnosis names what went wrong with a window, a soft cap, ALiBi or a sink, and keeps them in other guesses."""

from __future__ import annotations

from typing import Any

import pytest

from properties.diagnosis.engine import diagnose
from properties.inputs.recipes import Logits, Mask
from properties.inputs.strategies import attention_input
from properties.ops.attention.options import Extras
from properties.subject import PROFILES, subject_for
from targets.calling.registry import resolve
from targets.mutants.table import mutant_named

ALL = Extras((5, 1), 5.0, "heads", 1.0)
CAPPED: dict[str, Any] = {"extras": Extras(softcap=1.0), "logits": Logits("ascending", 8.0)}
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("window_ignored", {"extras": Extras(window=(3, 1))}, "the window were ignored"),
    ("window_without_right_end", {"extras": Extras(window=(3, 1))}, "the window had no right end"),
    ("window_one_key_too_far", {"extras": Extras(window=(3, 1))}, "the window reached one key further to the left"),
    ("window_one_key_short_in_decode", {"extras": Extras(window=(3, 1)), "sq": 1},
     "the window ended one key early on the left"),
    ("softcap_ignored", CAPPED, "the soft cap were ignored"),
    ("softcap_after_mask", CAPPED | {"mask": Mask("additive")}, "the soft cap were applied after bias and ALiBi"),
    ("alibi_ignored", {"extras": Extras(alibi="heads")}, "ALiBi were ignored"),
    ("alibi_favours_far_keys", {"extras": Extras(alibi="heads")}, "ALiBi had the wrong sign"),
    ("slopes_of_head_zero", {"extras": Extras(alibi="heads")}, "all heads used the ALiBi slope of head 0"),
    ("slopes_of_first_sequence", {"extras": Extras(alibi="sequences")},
     "all sequences used the ALiBi slopes of the first"),
    ("sinks_ignored", {"extras": Extras(sink=1.0)}, "the sink were ignored"),
    ("sinks_of_head_zero", {"extras": Extras(sink=1.0)}, "all heads used the sink of head 0"),
    ("sink_scaled", {"extras": Extras(sink=2.0)}, "the sink were scaled as scores are"),
    ("sink_in_every_split", {"extras": Extras(sink=1.0)}, "the sink were counted 2 times"),
    ("lse_without_sink", {"extras": Extras(sink=1.0)}, "the LSE left the sink out"),
    # Defects that have nothing to do with the options are found beside them.
    ("gain_one_percent", {"extras": ALL}, "the output were 1% too large"),
    ("gqa_tiled", {"extras": ALL, "group": 2}, "KV heads were tiled (h mod Hkv) instead of repeated"),
    ("causal_sees_next_key", {"extras": Extras(None, 5.0, "heads", 1.0), "is_causal": True},
     "the causal mask let each query see one more key"),
    ("mask_inverted", {"extras": Extras(None, 5.0, "heads", 1.0), "mask": Mask()}, "the mask's True meant hidden"),
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
