"""For authors of plug-ins: does a function declare what this suite understands, and does it behave as it declares?

    from targets.probing.conformance import check_target

    def test_my_kernel_conforms():
        assert check_target(my_kernel) == []

One tiny call per dtype and one per declared convention; whether the numbers are right is for the property suite to say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from oracle.contract.contract import resolved
from oracle.formats import FORMATS
from oracle.ops.contracts import declared_forms
from oracle.ops.table import ops
from targets.calling.metadata import metadata, problems
from targets.calling.signature import BadTarget, read
from targets.calling.target import Target, target_from
from targets.probing.asked import asked_of
from targets.probing.probes import contradictions
from targets.probing.tiny import tiny_case


def check_target(function: Target | Callable[..., object], *, op: str | None = None, device: str = "cpu") -> list[str]:
    """All that would keep a target from being verified, or that it declares and does not do; empty if it conforms.

    Takes a function (with or without ``__attn_oracle__``) or a `Target`. Never raises for what the function does.
    """
    if isinstance(function, Target):
        target = function
    else:
        spec = getattr(function, "__qualname__", type(function).__name__)
        meta = metadata(function)
        try:
            asked = op or (meta.get("op") if isinstance(meta, Mapping) else None)
            found = problems(meta, asked if asked in tuple(ops()) else read(function, spec, name=spec).op)
            if found:
                return found
            target = target_from(function, spec=spec, op=op)
        except BadTarget as error:
            return [str(error)]
    if device.partition(":")[0] not in target.devices:
        return [f"device {device} is not among the declared ones: {', '.join(target.devices)}"]
    found = []
    for dtype in target.dtypes:
        found += [f"{dtype}: {text}" for text in _wrong_call(target, dtype, device)]
    for dtype in target.dtypes if not found else ():
        found += [f"{dtype}: {text}" for text in contradictions(target, dtype, device=device)]
    return found


def _wrong_call(target: Target, dtype: str, device: str) -> list[str]:
    asked, seen = asked_of(target, dtype, device=device)
    case = tiny_case(target.op, dtype, width=asked.width)
    if seen.fault is not None:
        return [f"a call with {case.describe()} failed: {seen.fault[0]}: {seen.fault[1]}"]
    shapes = target.row.output_shapes(case)
    wrong = [
        f"{name} has shape {list(value.shape)}, expected {list(shapes[name])}"
        for name, value in seen.outputs.items()
        if tuple(value.shape) != tuple(shapes[name])
    ]
    contract = dict(target.contract) if isinstance(target.contract, Mapping) else target.contract
    output = declared_forms(target.op, contract, dtype)[0].output.stored_as
    expected = np.dtype(resolved(output, FORMATS[dtype]).dtype)
    for name in target.row.required_outputs(case):
        if name in seen.outputs and seen.outputs[name].dtype != expected:
            wrong.append(f"{name} has dtype {seen.outputs[name].dtype}, expected {expected}")
    return wrong
