"""What a target is, which arguments it takes, and how it is called once.

A target is at its simplest a plain function whose keyword parameters say what it supports. Metadata, where a function has some,
is the dict ``fn.__attn_oracle__`` (keys: `METADATA`), so that a plug-in imports nothing of this project.
"""

from __future__ import annotations

import inspect
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle.case import Case
from targets import frameworks

METADATA = (
    "op",
    "name",
    "dtypes",
    "devices",
    "contract",
    "conventions",
    "framework",
    "description",
    "requires",
    "counterpart",
    "interpreted",
)
ALIASES: dict[str, tuple[str, ...]] = {
    "q": ("query",),
    "k": ("key",),
    "v": ("value",),
    "is_causal": ("causal",),
    "scale": ("sm_scale", "softmax_scale"),
    "attn_mask": ("mask",),
    "positions": ("position_ids",),
    "window_size": ("window",),
    "softcap": ("logits_soft_cap",),
    "x": ("input", "logits", "scores"),
}
# Required parameters that identify each op, most specific first.
SIGNATURES: tuple[tuple[str, frozenset[str]], ...] = (
    ("mla", frozenset({"q_nope", "q_pe", "c_kv", "k_pe", "w_uk", "w_uv"})),
    ("attention", frozenset({"q", "k", "v"})),
    ("rope_apply", frozenset({"x", "cos", "sin"})),
    ("rope", frozenset({"x", "positions"})),
)
UNARY = ("softmax", "log_softmax", "logsumexp")
INPUTS: dict[str, tuple[str, ...]] = {
    "attention": ("q", "k", "v"),
    "mla": ("q_nope", "q_pe", "c_kv", "k_pe", "w_uk", "w_uv"),
    "rope": ("x", "positions"),
    "rope_apply": ("x", "cos", "sin"),
    "softmax": ("x",),
    "log_softmax": ("x",),
    "logsumexp": ("x",),
}
OUTPUTS: dict[str, tuple[str, ...]] = {"attention": ("out", "lse"), "mla": ("out", "lse")}
OPTIONS: dict[str, frozenset[str]] = {
    "attention": frozenset({"scale", "is_causal", "attn_mask", "return_lse"}),
    "mla": frozenset({"scale", "is_causal", "return_lse"}),
    "rope": frozenset({"base", "layout", "rotary_dim"}),
    "rope_apply": frozenset({"layout"}),
    "softmax": frozenset(),
    "log_softmax": frozenset(),
    "logsumexp": frozenset(),
}
# Names of options that fix what a case means without being passed to the function.
CONVENTION_OPTIONS = frozenset({"causal_alignment"})


class BadTarget(ValueError):
    """A function that cannot be a target; one line that names the parameter and the candidates."""


@dataclass(frozen=True, slots=True)
class Target:
    """One implementation of one op.

    parameters: canonical name -> the function's own keyword (None: positional only). required: canonical names without a
    default. origin: ``own``, ``third_party`` or ``user``. contract: None (the default preset), a preset name or a dict of fields.
    """

    name: str
    spec: str
    op: str
    function: Callable[..., Any]
    parameters: Mapping[str, str | None]
    required: frozenset[str]
    dtypes: tuple[str, ...] = ("fp32", "fp16", "bf16")
    devices: tuple[str, ...] = ("cpu",)
    contract: str | Mapping[str, Any] | None = None
    conventions: Mapping[str, str] = field(default_factory=dict)
    framework: str = "torch"
    description: str = ""
    origin: str = "user"
    counterpart: str | None = None
    interpreted: bool = False

    def lacks(self, case: Case) -> tuple[str, ...]:
        """Options set in the case that this target has no parameter for."""
        return tuple(
            name
            for name, value in case.options.items()
            if name not in self.parameters
            and name not in CONVENTION_OPTIONS
            and self.conventions.get(name) != value
            and not _is_default(name, value)
        )


def _is_default(name: str, value: Any) -> bool:
    defaults = {
        "is_causal": False,
        "scale": None,
        "attn_mask": None,
        "return_lse": False,
        "base": 10000.0,
        "layout": "half",
    }
    return value is None or (name in defaults and not isinstance(value, np.ndarray) and value == defaults[name])


@dataclass(frozen=True, slots=True)
class Observed:
    """What one call returned: arrays by output name, or ``fault`` (kind, message) if it failed. ``seconds`` of wall time."""

    outputs: Mapping[str, NDArray[Any]]
    fault: tuple[str, str] | None = None
    seconds: float = 0.0


def target_from(
    function: Callable[..., Any], *, spec: str, op: str | None = None, name: str | None = None, origin: str = "user"
) -> Target:
    """A target from a callable, its signature and its metadata. BadTarget, in one line, if it fits no op."""
    if not callable(function):
        raise BadTarget(f"{spec} is {type(function).__name__}, not a function")
    meta = dict(getattr(function, "__attn_oracle__", {}))
    unknown = sorted(set(meta) - set(METADATA))
    if unknown:
        raise BadTarget(f"{spec}: unknown metadata key {unknown[0]!r}; known: {', '.join(METADATA)}")
    chosen = op or meta.get("op")
    if chosen is not None and chosen not in INPUTS:
        raise BadTarget(f"{spec}: unknown op {chosen!r}; known: {', '.join(INPUTS)}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        if chosen is None:
            raise BadTarget(f"{spec} has no readable signature; name its op with --op") from None
        parameters: dict[str, str | None] = dict.fromkeys(INPUTS[chosen])
        required = frozenset(INPUTS[chosen])
    else:
        chosen, parameters, required = _match(function, signature, chosen, spec)
    return Target(
        name=name or meta.get("name") or getattr(function, "__name__", spec),
        spec=spec,
        op=chosen,
        function=function,
        parameters=parameters,
        required=required,
        dtypes=tuple(meta.get("dtypes", ("fp32", "fp16", "bf16"))),
        devices=tuple(meta.get("devices", ("cpu", "cuda"))),
        contract=meta.get("contract"),
        conventions=dict(meta.get("conventions", {})),
        framework=meta.get("framework", "torch"),
        description=meta.get("description", ""),
        origin=origin,
        counterpart=meta.get("counterpart"),
        interpreted=bool(meta.get("interpreted", False)),
    )


def _match(
    function: Callable[..., Any], signature: inspect.Signature, op: str | None, spec: str
) -> tuple[str, dict[str, str | None], frozenset[str]]:
    canonical = {alias: name for name, aliases in ALIASES.items() for alias in (name, *aliases)}
    own: dict[str, inspect.Parameter] = {}
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        own[canonical.get(parameter.name, parameter.name)] = parameter
    required = {n for n, p in own.items() if p.default is inspect.Parameter.empty}
    if op is None:
        op = next((name for name, needed in SIGNATURES if needed <= set(own)), None)
    if op is None and len(required) <= 1 and len(own) >= 1:
        plain = getattr(function, "__name__", "")
        op = next((name for name in sorted(UNARY, key=len, reverse=True) if name in plain), None)
    if op is None:
        names = ", ".join(p.name for p in own.values()) or "no parameters"
        raise BadTarget(f"{spec}({names}) fits no op; candidates: {', '.join(INPUTS)}; name one with --op")
    inputs = INPUTS[op]
    if not set(inputs) <= set(own):
        # A function whose parameters have other names takes the inputs by position.
        positional = [n for n, p in own.items() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
        if len(positional) < len(inputs):
            missing = next(n for n in inputs if n not in own)
            raise BadTarget(f"{spec}: op {op} needs a parameter {missing!r}; it has {', '.join(own) or 'none'}")
        renamed = dict(zip(positional, inputs, strict=False))
        own = {renamed.get(n, n): p for n, p in own.items()}
        required = {renamed.get(n, n) for n in required}
    known = set(inputs) | OPTIONS[op]
    strange = sorted(n for n in required if n not in known)
    if strange:
        raise BadTarget(
            f"{spec}: unknown required parameter {strange[0]!r} for op {op}; known: {', '.join(sorted(known))}"
        )
    parameters: dict[str, str | None] = {
        n: (None if p.kind is inspect.Parameter.POSITIONAL_ONLY else p.name) for n, p in own.items() if n in known
    }
    return op, parameters, frozenset(required & known)


def run(target: Target, case: Case, *, device: str = "cpu", seconds: float = 60.0, guarded: bool = False) -> Observed:
    """Call the target once on fresh copies of the case's arrays; every failure of the target becomes a `fault`.

    Kinds of fault: raised, timeout, output (wrong count, shape, type), mutated (an input changed), aliased (an output shares
    memory with an input), overrun (memory next to an input changed; asked only if ``guarded``, which places each input inside a
    larger buffer). The caller decides what each means.
    """
    bridge = frameworks.bridge(target.framework)
    fences = {n: frameworks.Fence(case.arrays[n]) for n in INPUTS[target.op]} if guarded and device == "cpu" else {}
    inputs = {
        n: bridge.adopt(fences[n].inside) if n in fences else bridge.to_native(case.arrays[n], device)
        for n in INPUTS[target.op]
    }
    options = {
        n: bridge.to_native(v, device) if isinstance(v, np.ndarray) else v for n, v in _arguments(target, case).items()
    }
    positional, keyword = [], {}
    for n, tensor in inputs.items():
        name = target.parameters.get(n)
        if name is None:
            positional.append(tensor)
        else:
            keyword[name] = tensor
    keyword |= {str(target.parameters[n]): v for n, v in options.items()}
    start = time.perf_counter()
    try:
        with deadline(seconds):
            result = target.function(*positional, **keyword)
            bridge.synchronise(device)
        outputs = _outputs(target, result, bridge)
    except Exception as error:  # the one place where a target's failure is expected
        kind = "timeout" if isinstance(error, TimeoutError) else "output" if isinstance(error, BadOutput) else "raised"
        text = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        return Observed({}, (kind, text), time.perf_counter() - start)
    elapsed = time.perf_counter() - start
    for n, tensor in inputs.items():
        if not _same_bits(bridge.to_numpy(tensor), case.arrays[n]):
            return Observed(outputs, ("mutated", f"input {n} was changed by the call"), elapsed)
    broken = next((n for n, fence in fences.items() if not fence.intact()), None)
    if broken is not None:
        return Observed(outputs, ("overrun", f"memory next to input {broken} was written"), elapsed)
    if (shared := bridge.shares_memory(result, list(inputs.values()))) is not None and target.op not in (
        "rope",
        "rope_apply",
    ):
        return Observed(
            outputs, ("aliased", f"an output shares memory with input {INPUTS[target.op][shared]}"), elapsed
        )
    return Observed(outputs, None, elapsed)


class BadOutput(ValueError):
    """The target returned something that is no array of its op."""


def _arguments(target: Target, case: Case) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for name in OPTIONS[target.op]:
        if name not in target.parameters:
            continue
        value = case.options.get(name)
        if name == "return_lse":
            value = True
        elif name == "is_causal":
            value = bool(value)
        elif value is None and name in target.required:
            value = _required_default(target.op, name, case)
        if value is not None:
            given[name] = value
    return given


def _required_default(op: str, name: str, case: Case) -> Any:
    if name == "scale":
        width = sum(case.arrays[n].shape[-1] for n in (("q",) if op == "attention" else ("q_nope", "q_pe")))
        return 1.0 / float(np.sqrt(width))
    return (
        {"base": 10000.0, "layout": "half", "rotary_dim": case.arrays["x"].shape[-1]}.get(name)
        if op == "rope"
        else None
    )


def _outputs(target: Target, result: Any, bridge: Any) -> dict[str, NDArray[Any]]:
    names = OUTPUTS.get(target.op, ("out",))
    if isinstance(result, Mapping):
        items = [(n, result[n]) for n in names if n in result]
    else:
        values = list(result) if isinstance(result, tuple | list) else [result]
        items = list(zip(names, values, strict=False))
    if not items:
        raise BadOutput(f"returned {type(result).__name__}, expected {' and '.join(names)}")
    outputs = {}
    for n, value in items:
        if value is None:
            continue
        if not bridge.is_native(value):
            raise BadOutput(f"output {n} is {type(value).__name__}, not a {target.framework} array")
        outputs[n] = bridge.to_numpy(value)
    if "out" not in outputs:
        raise BadOutput(f"returned no {names[0]}")
    return outputs


def _same_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return a.shape == b.shape and np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """TimeoutError in the main thread after ``seconds``; elsewhere, and inside code that never returns to Python, no effect."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: Any) -> None:
        raise TimeoutError(f"no result after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:
            signal.setitimer(signal.ITIMER_REAL, left)
