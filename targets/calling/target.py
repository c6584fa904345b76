"""What a target is, what it may declare, and how it is called once.

A target is at its simplest a plain function whose keyword parameters say what it supports. Metadata, where a function
has some, is the dict ``fn.__attn_oracle__`` (`targets.calling.metadata`), so that a plug-in imports nothing of this
project.
"""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from oracle.case import Case
from oracle.formats import StoredArray
from oracle.ops.op import Op
from oracle.ops.table import op_named, ops
from targets.calling import frameworks
from targets.calling.deadline import Overdue, deadline
from targets.calling.metadata import DEVICES, metadata, problems
from targets.calling.signature import BadTarget, read

__all__ = ["BadTarget", "Observed", "Session", "Target", "run", "target_from"]

# Calls that died or did not end, after which a target is not called again.
PATIENCE = 3


@dataclass(slots=True)
class Session:
    """How one process deals with one target.

    seconds: that a call may take. lost: how calls ended that died or never returned. expendable: the process may be
    killed to end a call that never returns to Python, because somebody replaces it. words: what a command line needs
    to call the target the same way.
    """

    seconds: float = 60.0
    lost: list[str] = field(default_factory=list)
    expendable: bool = False
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Target:
    """One implementation of one op.

    parameters: canonical name -> the function's own keyword, in its order (None: an input goes by position, the LSE
    comes unasked). required: canonical names without a default. origin: ``own``, ``third_party`` or ``user``.
    contract: None (the default preset), a preset name or a dict of fields. stated: the metadata keys that the
    function has. forward: the target of which this is the gradient by automatic differentiation.
    gradients: whether the gradient of this target is examined too.
    """

    name: str
    spec: str
    op: str
    function: Callable[..., Any]
    parameters: Mapping[str, str | None]
    required: frozenset[str]
    dtypes: tuple[str, ...] = ("fp32", "fp16", "bf16")
    devices: tuple[str, ...] = DEVICES
    contract: str | Mapping[str, object] | None = None
    conventions: Mapping[str, str] = field(default_factory=dict)
    framework: str = "torch"
    description: str = ""
    origin: str = "user"
    counterpart: str | None = None
    interpreted: bool = False
    stated: frozenset[str] = frozenset()
    session: Session = field(default_factory=Session, compare=False)
    forward: Target | None = None
    gradients: bool = True

    @property
    def row(self) -> Op:
        """All that is true of its op."""
        return op_named(self.op)

    def lacks(self, case: Case) -> tuple[str, ...]:
        """Options set in the case that this target has no parameter for."""
        row = self.row
        return tuple(
            name
            for name, value in case.options.items()
            if name not in self.parameters
            and name not in row.meanings
            and self.conventions.get(name) != value
            and not row.is_default(name, value)
        )


@dataclass(frozen=True, slots=True)
class Observed:
    """What one call returned: arrays by output name, or ``fault`` (kind, message) if it failed; seconds it took."""

    outputs: Mapping[str, StoredArray]
    fault: tuple[str, str] | None = None
    seconds: float = 0.0


def target_from(
    function: Callable[..., object], *, spec: str, op: str | None = None, name: str | None = None, origin: str = "user"
) -> Target:
    """A target from a callable, its signature and its metadata. BadTarget, in one line, if it fits no op.

    A class is instantiated if that takes no arguments. A partial's metadata is that of the function inside.
    """
    if inspect.isclass(function):
        function = _instance(function, spec)
    if not callable(function):
        raise BadTarget(f"{spec} is {type(function).__name__}, not a function")
    meta = metadata(function)
    called = name or spec.rpartition(":")[2]
    asked = op or (meta.get("op") if isinstance(meta, Mapping) else None)
    if asked is not None and asked not in tuple(ops()):
        raise BadTarget(f"{spec}: unknown op {asked!r}; known: {', '.join(ops())}")
    reading = read(function, spec, op=asked, name=getattr(function, "__name__", called))
    for problem in problems(meta, reading.op):
        raise BadTarget(f"{spec}: {problem}")
    framework = meta.get("framework", "torch")
    return Target(
        name=name or meta.get("name") or called,
        spec=spec,
        op=reading.op,
        function=function,
        parameters=reading.parameters,
        required=reading.required,
        dtypes=tuple(meta.get("dtypes", ("fp32", "fp16", "bf16"))),
        devices=tuple(meta.get("devices", DEVICES if framework == "torch" else ("cpu",))),
        contract=meta.get("contract"),
        conventions=dict(meta.get("conventions", {})),
        framework=framework,
        description=meta.get("description", ""),
        origin=origin,
        counterpart=meta.get("counterpart"),
        interpreted=bool(meta.get("interpreted", False)),
        gradients=bool(meta.get("gradients", True)),
        stated=frozenset(meta),
    )


def _instance(kind: Any, spec: str) -> Any:
    try:
        needed = [
            p.name
            for p in inspect.signature(kind).parameters.values()
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
    except (TypeError, ValueError):
        needed = []
    if needed:
        raise BadTarget(f"{spec} is a class whose instances need {', '.join(needed)}: name an instance or a function")
    try:
        return kind()
    except Exception as error:
        raise BadTarget(f"{spec} is a class, and {one_line(error)} on making an instance") from error


def run(
    target: Target, case: Case, *, device: str = "cpu", seconds: float | None = None, guarded: bool = False
) -> Observed:
    """Call the target once on fresh copies of the case's arrays; every failure of the target becomes a `fault`.

    Kinds of fault: raised, timeout, output (wrong count or type, or unreadable), mutated (an input changed), aliased
    (an output shares memory with an input), overrun (memory next to an array changed; asked only if ``guarded``,
    which places each inside a larger buffer), given up (not called, after `PATIENCE` lost calls). The caller
    decides what each means.
    """
    session = target.session
    if len(session.lost) >= PATIENCE:
        count, last = len(session.lost), session.lost[-1]
        text = f"not called, because {count} calls of this target died or did not end (last: {last})"
        return Observed({}, ("given up", text))
    bridge = frameworks.bridge(target.framework)
    names = target.row.inputs
    given = _arguments(target, case)
    guards: dict[str, frameworks.GuardBytes] = {}

    def native(name: str, array: StoredArray) -> object:
        # A boolean has no value that no mask holds.
        if not guarded or array.dtype == np.bool_:
            return bridge.to_native(array, device)
        guards[name] = frameworks.GuardBytes(bridge, array, device)
        return guards[name].inside

    inputs = {n: native(n, case.arrays[n]) for n in names}
    options = {n: native(n, v) if isinstance(v, np.ndarray) else v for n, v in given.items()}
    positional = [inputs[n] for n, own in target.parameters.items() if n in inputs and own is None]
    keyword = {own: inputs[n] for n, own in target.parameters.items() if n in inputs and own is not None}
    keyword |= {str(target.parameters[n]): v for n, v in options.items()}
    limit = session.seconds if seconds is None else seconds
    start = time.perf_counter()
    result, failure = None, ""
    try:
        # What the target does to numpy's error handling is undone, and what it warns about is its own affair.
        with deadline(limit, expendable=session.expendable), np.errstate(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                result = target.function(*positional, **keyword)
                bridge.synchronise(device)
            except (KeyboardInterrupt, Overdue):
                raise
            # The one place where a target's failure is expected; it may also call sys.exit, or skip a test.
            except BaseException as error:
                failure = one_line(error)
    except Overdue as late:
        session.lost.append(str(late))
        return Observed({}, ("timeout", str(late)), time.perf_counter() - start)
    elapsed = time.perf_counter() - start
    if failure:
        return Observed({}, ("raised", failure), elapsed)
    try:
        outputs = _outputs(target, case, result, bridge)
    except BadOutput as error:
        return Observed({}, ("output", str(error)), elapsed)
    originals = {**given, **case.arrays}
    for n, tensor in {**inputs, **options}.items():
        if isinstance(originals[n], np.ndarray) and not _unchanged(bridge, tensor, originals[n]):
            return Observed(outputs, ("mutated", f"input {n} was changed by the call"), elapsed)
    broken = [n for n, guard in guards.items() if not guard.intact()]
    if broken:
        return Observed(outputs, ("overrun", f"memory next to {', '.join(broken)} was written"), elapsed)
    shared = None if target.row.may_alias else bridge.shares_memory(result, list(inputs.values()))
    if shared is not None:
        return Observed(outputs, ("aliased", f"an output shares memory with input {names[shared]}"), elapsed)
    return Observed(outputs, None, elapsed)


class BadOutput(ValueError):
    """The target returned something that is no array of its op."""


def one_line(error: BaseException) -> str:
    """Type and message of an exception, in one line of bounded length."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def _arguments(target: Target, case: Case) -> dict[str, Any]:
    given: dict[str, object] = {}
    row = target.row
    for name in sorted(row.parameters | set(row.extras)):
        if target.parameters.get(name) is None:
            continue
        value = case.options.get(name)
        if name == "return_lse":
            value = True
        elif name == "is_causal":
            value = bool(value)
        # What follows from the inputs is given whether it is required or not.
        elif value is None and (name in target.required or callable(row.extras.get(name))):
            value = row.usual_value(name, case)
        if value is not None or name in target.required:
            given[name] = value
    return given


def _names(target: Target, case: Case, count: int) -> tuple[str, ...]:
    """What ``count`` values are, in order: all outputs that the function can have, or else those of this case."""
    row = target.row
    options = {} if row.gradient is None else {output: option for option, output in row.gradient.options.items()}
    possible = tuple(n for n in row.outputs if n not in options or options[n] in target.parameters)
    present = tuple(n for n in possible if n not in options or case.options.get(options[n]) is not None)
    return present if count == len(present) else possible


def _outputs(target: Target, case: Case, result: Any, bridge: frameworks.Bridge[Any]) -> dict[str, StoredArray]:
    names = target.row.outputs
    if isinstance(result, Mapping):
        items = [(n, result[n]) for n in names if n in result]
    else:
        values = list(result) if isinstance(result, tuple | list) else [result]
        names = _names(target, case, len(values))
        items = list(zip(names, values, strict=False))
    if not items or items[0][1] is None:
        raise BadOutput(f"returned {_shown(result)}, expected {' and '.join(names)}")
    outputs: dict[str, StoredArray] = {}
    for n, value in items:
        if value is None:
            continue
        if n == "lse" and "return_lse" not in target.parameters and not _is_unasked_lse(target, value, items[0][1]):
            continue
        if not bridge.is_native(value):
            hint = "; a numpy function declares framework 'numpy'" if isinstance(value, np.ndarray) else ""
            raise BadOutput(f"output {n} is {type(value).__name__}, not a {target.framework} array{hint}")
        try:
            outputs[n] = bridge.to_numpy(value)
        except Exception as error:
            raise BadOutput(f"output {n} cannot be read: {one_line(error)}") from error
    if names[0] not in outputs:
        raise BadOutput(f"returned no {names[0]}")
    return outputs


def _shown(result: object) -> str:
    return f"an empty {type(result).__name__}" if isinstance(result, tuple | list | Mapping) else type(result).__name__


def _is_unasked_lse(target: Target, value: object, out: object) -> bool:
    """Whether a second output that nobody asked for has the LSE's shape; attention weights have not."""
    if isinstance(target.contract, Mapping) and target.contract.get("lse") == "absent":
        return False
    shapes = [tuple(getattr(x, "shape", ())) for x in (value, out)]
    return len(shapes[1]) > 0 and shapes[0] == shapes[1][:-1]


def _unchanged(bridge: frameworks.Bridge[Any], tensor: Any, before: StoredArray) -> bool:
    try:
        after = bridge.to_numpy(tensor)
    except Exception:
        # The target took the input's storage away.
        return False
    return after.shape == before.shape and after.tobytes() == np.ascontiguousarray(before).tobytes()
