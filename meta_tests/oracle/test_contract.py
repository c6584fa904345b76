"""No contract can be made that claims the impossible, and no preset can be changed."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass, fields, is_dataclass
from typing import Any

import pytest

from oracle.contract import contract as contracts
from oracle.contract.constants import constants
from oracle.contract.contract import FIELDS, Contract, UnknownContract, contract_of
from oracle.contract.presets import Presets
from oracle.formats import FORMATS
from oracle.ops.contracts import declared_forms
from oracle.ops.table import op_named, ops

# What no field takes: a value of a type that no claim has, and what each kind of claim could be mistaken for.
NONSENSE = (object(), ["fp32"], b"fp32", float("nan"))
WRONG_NAMES = ("", "fp31", "Fp32", "naturall", "exp3", "on")
IMPOSSIBLE_NUMBERS = (-1, -0.5, float("inf"), float("nan"), 10**400, True, "8")
# One wrong value a field that a user could well write.
LIKELY: dict[str, Any] = {
    "preset": 32,
    "label": None,
    "compute": "float32",
    "engine": "h200",
    "operands": "fp32",
    "flush": 1,
    "exp": 1.0,
    "tanh": -1e-3,
    "tanh_abs": "1e-3",
    "qk_prescale": "output",
    "scores": "half",
    "score_stores": -1,
    "shifted": "f16",
    "exponent": "base2",
    "maximum": "lazy",
    "weights": "e4m3fn",
    "weight_scale": 0.0,
    "normalised_p": "yes",
    "row_sum": "input",
    "accumulator": "input",
    "tile": 0,
    "splits": 0,
    "lag": -1.0,
    "output": "float16",
    "output_stores": 0,
    "saturate": None,
    "lse": "exp2",
    "from_lse": 0,
    "angle": "f32",
    "table": True,
    "rotate": 32,
    "form": "absorb",
    "latent": "bfloat16",
    "up": "",
    "between": "none",
    "cache": "int8",
    "delta": "o",
    "grad_stores": 1.5,
    "dp_stored": 2,
}


def test_every_field_has_a_likely_mistake_here() -> None:
    assert set(LIKELY) == set(FIELDS)


def test_flat_names_reach_every_field_of_every_group_once() -> None:
    groups = {g.name: {f.name for f in fields(g.default)} for g in fields(Contract) if is_dataclass(g.default)}
    inside = {(group, name) for group, names in groups.items() for name in names}
    assert sorted(FIELDS.values()) == sorted(inside | {("", "preset"), ("", "label")})


@pytest.mark.parametrize("name", FIELDS)
def test_a_wrong_value_is_named_with_its_field_and_the_valid_ones(name: str) -> None:
    for value in (LIKELY[name], *NONSENSE):
        with pytest.raises(UnknownContract) as refused:
            Contract().with_fields(**{name: value})
        said = str(refused.value)
        assert said.startswith(f"contract field {name} is {value!r}; valid: ")
        assert said.partition("; valid: ")[2]
        assert "\n" not in said


@pytest.mark.parametrize("name", sorted(set(FIELDS) - {"preset", "label"}))
def test_what_is_listed_as_valid_is_taken_and_nothing_near_it(name: str) -> None:
    group, own = FIELDS[name]
    claim = next(f for f in fields(getattr(Contract(), group)) if f.name == own)
    valid = claim.metadata["valid"]
    if isinstance(valid, contracts._OneOf):
        for value in valid.values:
            assert getattr(getattr(Contract().with_fields(**{name: value}), group), own) == value
            assert str(value) in str(valid).split(", ")
        wrong: tuple[Any, ...] = WRONG_NAMES
    else:
        wrong = IMPOSSIBLE_NUMBERS
    for value in wrong:
        with pytest.raises(UnknownContract, match=f"contract field {name} is"):
            Contract().with_fields(**{name: value})


def test_a_field_without_validation_is_found() -> None:
    # What the two tests above lean on: a claim that says nothing of its values is accepted with any.
    @dataclass(frozen=True, slots=True)
    class Loose(contracts._Validated):
        kept: str = "fp32"
        held: str = contracts._named("fp32", "fp32")

    assert Loose(kept="nonsense").kept == "nonsense"
    with pytest.raises(UnknownContract, match="contract field held is 'nonsense'; valid: fp32"):
        Loose(held="nonsense")


def test_an_unknown_field_lists_all_known_ones() -> None:
    with pytest.raises(UnknownContract) as refused:
        declared_forms("attention", {"wieghts": "e4m3"}, "bf16")
    assert str(refused.value) == f"unknown contract field 'wieghts'; known: {', '.join(sorted(FIELDS))}"


def test_users_write_flat_fields() -> None:
    declared = {"preset": "flash", "weights": "e4m3", "weight_scale": 256.0, "output": "fp16"}
    for form in declared_forms("attention", declared, "e4m3"):
        assert (form.weights.cast_to, form.weights.scale, form.output.stored_as) == ("e4m3", 256.0, "fp16")
        assert form.preset == "flash"


@pytest.mark.parametrize("op", ops())
def test_no_preset_can_be_changed(op: str) -> None:
    presets = op_named(op).presets
    for table in (presets.forms, presets.ladder, presets.default):
        first = next(iter(table))
        with pytest.raises(TypeError):
            table[first] = ()  # type: ignore[index]
        with pytest.raises(TypeError):
            del table[first]  # type: ignore[attr-defined]
        assert all(isinstance(row, tuple | str) for row in table.values())
    with pytest.raises(FrozenInstanceError):
        presets.forms = {}  # type: ignore[misc]
    form = next(iter(presets.forms.values()))[0]
    with pytest.raises(FrozenInstanceError):
        form.weights.scale = 2.0  # type: ignore[misc]


def test_what_a_table_of_presets_was_made_from_is_not_it() -> None:
    made_from = {"x": (contract_of("x"),)}
    presets = Presets(made_from, {}, {})
    made_from["y"] = ()
    assert list(presets.forms) == ["x"]


def test_numbers_of_a_contract_are_computed_once() -> None:
    one, two = contract_of("x", weights="e4m3"), contract_of("x", weights="e4m3")
    assert one is not two
    assert constants(one, FORMATS["bf16"]) is constants(two, FORMATS["bf16"])
    assert constants(one, FORMATS["bf16"]) != constants(one, FORMATS["fp16"])
    assert constants(one, FORMATS["bf16"]) != constants(contract_of("x"), FORMATS["bf16"])
