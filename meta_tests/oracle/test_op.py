"""The row of an op says what its functions do: dimensions, outputs, options, gradients, trivial outputs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from oracle.evaluate import enclose
from oracle.ops.op import Array, Op, check_dims
from oracle.ops.table import op_named, ops
from targets.probing.tiny import tiny_case

OPS = tuple(ops())


def wrong(row: Op) -> list[str]:
    """What a row says that its functions, on its own tiny case, do not."""
    case = tiny_case(row.name, "fp32", heads=2, kv_heads=1, queries=2, keys=3, width=16, value_dims=8)
    size = {"...": 2}
    found = []
    for name, array in row.arrays.items():
        size |= dict(array.sizes(case.arrays[name]))
        if array.is_float != (case.arrays[name].dtype == np.float32):
            found.append(f"{name} is {case.arrays[name].dtype}")
    shapes = row.output_shapes(case)
    for name, dims in row.results.items():
        # A gradient of an option is there only where a case sets it.
        if name in shapes and all(axis in size for axis in dims.split()):
            if shapes[name] != tuple(size[axis] for axis in dims.split()):
                found.append(f"{name} has shape {shapes[name]}, not {dims}")
    found += [f"no {name} is evaluated" for name in shapes if not any(name in b.values for b in enclose(case))]
    found += [f"default of {n}" for n in row.meanings if row.options[n] not in row.conventions[n]]
    if row.gradient is not None:
        given, options = op_named(row.gradient.of), row.gradient.options
        told = {*row.gradient.inputs.values(), *options.values()}
        found += [f"{n} is the gradient of nothing" for n in row.outputs if n not in told]
        found += [f"{n} is no input of {given.name}" for n in row.gradient.inputs if n not in given.inputs]
        found += [f"{n} is no option" for n in options if n not in row.options]
    for name, trivial in row.trivial(case, enclose(case)[0]).items():
        if trivial.hi.shape != enclose(case)[0].part(row.outputs[0]).hi.shape:
            found.append(f"{name} has shape {trivial.hi.shape}")
    return found


@pytest.mark.parametrize("op", OPS)
def test_a_row_says_what_its_functions_do(op: str) -> None:
    assert wrong(op_named(op)) == []


def test_a_row_that_says_otherwise_is_found() -> None:
    row = op_named("attention")
    assert wrong(replace(row, results={"out": "B Hkv Sq Dv", "lse": "B Hq Sq"}))
    assert wrong(replace(row, options={**row.options, "lse_sink": "sometimes"}))
    backward = op_named("rope_backward")
    assert backward.gradient is not None
    assert wrong(replace(backward, gradient=replace(backward.gradient, inputs={"y": "dy"})))
    assert wrong(replace(row, arrays={**row.arrays, "q": Array("B Hq Sq D", "index")}))


def test_one_name_of_an_axis_is_one_size() -> None:
    row, case = op_named("mla"), tiny_case("mla", "fp32")
    assert check_dims(row.arrays, case, row.inputs)["d_c"] == 32
    with pytest.raises(ValueError, match="k_pe has Sk = 2, but c_kv has Sk = 3"):
        check_dims(row.arrays, case.with_arrays(k_pe=case.arrays["k_pe"][:, :2]), row.inputs)
    with pytest.raises(ValueError, match=r"k_pe must be \[B, Sk, d_r\], got shape \[3, 8\]"):
        check_dims(row.arrays, case.with_arrays(k_pe=case.arrays["k_pe"][0]), row.inputs)
