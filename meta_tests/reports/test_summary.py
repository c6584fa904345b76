"""What is counted, what is called worst, and in which order."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from meta_tests.reports.synthetic import FAILED, PASSED, write
from properties.judge.verdict import Verdict
from reports.content.blind_spots import seen, spots
from reports.content.wording import case_size, difference, exact_value, figure
from reports.run.load import Run, load
from reports.run.summary import (
    GRAVEST_FIRST,
    by_subject,
    code_of,
    contract_of,
    findings,
    gravest,
    pooled,
    property_order,
    property_rows,
    worst_ratio,
)


def run_of(*records: object, faults: tuple[str, ...] = ()) -> Run:
    return Run(Path("out"), tuple(records), faults=faults)  # type: ignore[arg-type]


def test_every_verdict_has_its_gravity() -> None:
    assert set(GRAVEST_FIRST) == set(Verdict)
    assert gravest(["PASS", "EXEMPT", "FAIL", "UNDECIDED"]) == "FAIL"
    assert gravest(["PASS", "VACUOUS"]) == "VACUOUS"
    assert gravest([]) == "UNSUPPORTED"


def test_a_fault_of_the_suite_outranks_findings() -> None:
    assert code_of(run_of(PASSED)) == 0
    assert code_of(run_of(PASSED, FAILED)) == 1
    assert code_of(run_of(FAILED, faults=("test: broke",))) == 3
    assert code_of(run_of()) == 3


def test_the_smallest_case_of_a_finding_comes_first() -> None:
    small = replace(FAILED, description="attention(q[1, 1, 1, 8] bfloat16, k[1, 1, 2, 8] bfloat16)", dtype="fp16")
    unknown = replace(FAILED, description="")
    (finding,) = findings(run_of(FAILED, unknown, small))
    assert finding.records == (small, FAILED, unknown)
    assert finding.properties == ("P1",)
    assert finding.verdict == "FAIL"


def test_findings_are_apart_by_target_property_and_verdict() -> None:
    error = replace(FAILED, verdict="ERROR", detail="raised: RuntimeError: shape 3")
    found = findings(run_of(FAILED, replace(FAILED, target="b"), replace(FAILED, property="P9"), error))
    assert [(f.subject.target, f.properties, f.verdict) for f in found] == [
        ("b", ("P1",), "FAIL"),
        ("kernel", ("P1",), "FAIL"),
        ("kernel", ("P1",), "ERROR"),
        ("kernel", ("P9",), "FAIL"),
    ]


def test_calls_that_raise_for_one_reason_are_one_finding() -> None:
    one = replace(FAILED, verdict="ERROR", detail="raised: RuntimeError: size 4 against 2")
    same = replace(one, property="P10", detail="V = 1: raised: RuntimeError: size 128 against 64")
    other = replace(one, property="P9", detail="raised: ValueError: no")
    assert [f.properties for f in findings(run_of(same, other, one))] == [("P1", "P10"), ("P9",)]


def test_properties_are_in_the_order_of_the_catalogue() -> None:
    ids = ["contract", "G3", "P10", "P2", "P1"]
    assert sorted(ids, key=property_order) == ["P1", "P2", "P10", "G3", "contract"]


def test_property_rows_count_by_dtype_and_keep_the_worst_ratio() -> None:
    (row,) = property_rows([PASSED, replace(PASSED, ratio=0.75), FAILED, replace(PASSED, dtype="fp32", ratio=None)])
    assert row.counts == {"bf16": {"PASS": 2, "FAIL": 1}, "fp32": {"PASS": 1}}
    assert row.ratios == {"bf16": 12.5, "fp32": None}


def test_properties_that_share_an_id_are_apart() -> None:
    other = replace(PASSED, title="another property of the same id")
    assert [(row.property, row.title) for row in property_rows([PASSED, other])] == [
        ("P1", PASSED.title),
        ("P1", other.title),
    ]
    failed = (FAILED, replace(FAILED, title=other.title))
    assert [f.title for f in findings(run_of(*failed))] == [FAILED.title, other.title]


def test_rounded_infinities_do_not_make_more_than_all() -> None:
    metrics = {"out": {"n": 6, "exact": 8, "overflowed": 2}}
    found = pooled([replace(PASSED, metrics=metrics)], "out")
    assert found is not None
    assert found.exact == 1.0


def test_run_level_records_without_an_op_belong_to_their_target() -> None:
    stale = replace(PASSED, op="", verdict="STALE_WAIVER", property="P2")
    run = run_of(PASSED, stale)
    (finding,) = findings(run)
    assert by_subject(run) == {finding.subject: (PASSED, stale)}


def test_pooled_means_weigh_elements_and_maxima_are_of_the_worst_case() -> None:
    small = {
        "n": 10,
        "exact": 10,
        "ulp_max": 40.0,
        "ulp_p999": 40.0,
        "ulp_mean": 4.0,
        "bias": 2.0,
        "z": 3.0,
        "nonfinite": 1,
    }
    both = pooled([PASSED, replace(PASSED, metrics={"out": small})], "out")
    assert both is not None
    assert both.n == 2010
    assert both.exact == 1510 / 2010
    assert both.ulp_max == 40.0
    assert both.nonfinite == 1
    assert both.ulp_mean == pytest.approx((0.5 * 2000 + 4.0 * 10) / 2010)
    # The 99.9% quantile of ten elements is no quantile.
    assert both.ulp_p999 == 2.0
    assert both.z == pytest.approx((1.5 + 3.0) / math.sqrt(2))


def test_infinite_and_missing_figures_are_pooled() -> None:
    metrics = {
        "out": {"n": 5, "exact": 0, "ulp_max": "inf", "ulp_p999": None, "ulp_mean": "inf", "bias": None, "z": "inf"}
    }
    found = pooled([replace(PASSED, metrics=metrics)], "out")
    assert found is not None
    assert found.ulp_max == math.inf
    assert found.bias is None
    assert found.z is None
    assert pooled([PASSED], "lse") is None


def test_the_worst_case_is_of_derived_bounds_only() -> None:
    calibrated = replace(PASSED, property="G3", basis="calibrated", ratio=900.0)
    run_level = replace(PASSED, property="contract", ratio=500.0)
    assert worst_ratio([PASSED, calibrated, FAILED, run_level]) == FAILED
    assert worst_ratio([replace(PASSED, ratio=math.nan)]) is not None


def test_the_contract_line_of_a_run(tmp_path: Path) -> None:
    kept = replace(PASSED, property="contract", detail="contract flash kept in its plain form by all 3 cases")
    assert contract_of(load(write(tmp_path, [PASSED, kept])).records) == ("flash", kept.detail)


def hidden(*records: object) -> str:
    return " / ".join(f"{defect}: {reason}" for defect, reason in spots(seen(records)))  # type: ignore[arg-type]


def test_without_an_lse_its_defects_are_named_invisible() -> None:
    with_lse = replace(PASSED, metrics={**PASSED.metrics, "lse": {"n": 4}})
    assert "log2(e)" in hidden(PASSED)
    assert "log2(e)" not in hidden(with_lse)
    wide = replace(PASSED, dtype="fp32", contract="fp32")
    assert "log2(e)" not in hidden(wide)
    assert "merge of split keys" in hidden(wide)


def test_interpreted_narrow_and_unjudged_targets_say_what_they_hide() -> None:
    assert "interpreter figures" in hidden(replace(PASSED, datasheet={"interpreted": True}))
    assert "interpreter" not in hidden(PASSED)
    assert "tf32" in hidden(PASSED)
    assert "tf32 with" not in hidden(replace(PASSED, dtype="fp32"))
    judged = (PASSED, replace(PASSED, property="G3"))
    assert "systematic" not in hidden(*judged)
    assert "systematic" in hidden(*(replace(r, contract="eager") for r in judged))
    assert "CPU was used" in hidden(replace(PASSED, origin="third_party"))
    assert "CPU was used" not in hidden(PASSED)
    rope = replace(PASSED, op="rope", contract="fp32_angle", features={"position": 2**21})
    assert "full turn" in hidden(rope)
    assert "full turn" not in hidden(replace(rope, features={"position": 4096}))


def test_a_property_that_was_unsupported_hides_what_it_would_show() -> None:
    g3 = replace(PASSED, property="G3", verdict="UNSUPPORTED")
    assert "systematic" in hidden(PASSED, g3)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
        (math.nan, "NaN"),
        (0.12345, "0.123"),
        (-12.5, "−12.5"),
        (43210.0, "43,210"),
        (1e-8, "10⁻⁸"),
        (2.5e7, "2.5×10⁷"),
        (-2.5e-7, "−2.5×10⁻⁷"),
    ],
)
def test_figures_read_as_written(value: float | None, text: str) -> None:
    assert figure(value) == text


def test_exact_values_are_shown_in_decimal_and_hex() -> None:
    assert exact_value("0x1.68p-2") == "0.3515625 (0x1.68p-2)"
    assert exact_value("inf") == "inf"
    assert exact_value("nothing") == "nothing"
    assert difference("0x1.8p-1", "0x1.0p-1", "0x1p-60") == 0.25 - 2.0**-60
    assert difference("nan", "0x1p0") is None
    assert difference("0x1p0", None) is None


def test_sizes_of_cases_are_read_from_their_descriptions() -> None:
    assert case_size("attention(q[1, 2, 3] x, k[4] x; scale=0.5)") == 10
    assert case_size("") > case_size("softmax(x[1000000, 1000000] float32)")
