"""Launch Triton kernels: compiled on a GPU, interpreted on a CPU, and there with bfloat16 that is right.

Triton's interpreter replays a kernel in numpy, one program after another. Three things about it need care.

*Which kernels it runs.* `@triton.jit` decides once, when it decorates, from `TRITON_INTERPRET`. `launch`
does not depend on that: it wraps the plain Python function under the decorator in an interpreter object
itself, so that a CPU tensor is interpreted and a CUDA tensor is compiled in one process, whichever order
things were imported in. Decorated functions that a kernel names at its module's top level and calls are wrapped
with it. The price is a rule for kernels launched here: of Triton's own library they call builtins only
(`tl.reduce` with a combine function of `tl.standard`, not `tl.max`), because `tl.max`, `tl.sum`, `tl.zeros`
are decorated functions of another module. Kernels of other people need `prepare_environment` before triton is
imported.

*bfloat16.* The interpreter keeps a bfloat16 as its 16 bits in a numpy `uint16`, and calculates on those
integers: products, sums, dots and comparisons are silently meaningless, and conversions from float32 cut
bits off. `repaired_bf16` replaces those operations, for the time of a `with` block, by ones that widen to
float32 (exact: the 16 bits are the upper half of a float32), calculate there, and round once to nearest
even. Why that equals bfloat16 arithmetic:

- One operation +, -, *, / of two 8-bit significands, rounded to 24 bits and then to 8, gives the same as one
  rounding, as 24 >= 2*8 + 2 (Figueroa, "When is double rounding innocuous?", 1995). Subnormals are no
  exception: both formats have the same exponents, products and sums near the ties of bfloat16 subnormals are
  exact in float32, and a quotient that is not a tie is further from it than 2^-143, more than the 2^-150 that
  float32 can lose. The remainder `fmod`, `min`, `max`, negation and comparisons are exact.
- A fused multiply-add and a conversion from float64 are not covered by that. They round to odd on the way
  (Boldo and Melquiond, 2008): an inexact value becomes the neighbour with an odd last bit, which can no
  longer be mistaken for a tie when it is rounded again. An int64 beyond 2^53 first rounds to float64.
- A dot product has exact products (8 + 8 bits fit into 24) and float32 sums, which is what matrix engines
  offer at best.
- `sum`, `cumsum` and `cumprod` run in float32 and round each result once. A GPU may round after every step,
  in an order that Triton leaves open: this is one legal outcome, the one that torch gives too.
- Loads, stores, selections, transpositions, `abs` and bit casts move whole patterns and need no repair.

What it cannot repair (float8 to or from bfloat16, other rounding modes, atomics, scaled dots) raises
NotImplementedError. It relies on internals of the interpreter, read in Triton 3.6 to 3.9: any other version,
a missing internal, or a failed self-check raises NotImplementedError too, so that bfloat16 is refused and
never silently wrong.

*What its figures mean.* numpy's exp and sin stand in for the GPU's approximations, and a dot is one BLAS
call: errors measured here are not GPU errors.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from oracle.formats import FloatArray, StoredArray

if TYPE_CHECKING:
    import triton.language as tl
    from triton._C.libtriton.ir import ROUNDING_MODE
    from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, ReduceOps, ScanOps, TensorHandle
    from triton.runtime.jit import JITFunction

    Method = Callable[..., object]

FIRST_VERSION, LAST_VERSION = (3, 6), (3, 9)


def prepare_environment() -> None:
    """Switch this process to interpreted Triton, for kernels that are not launched through `launch`.

    Raises RuntimeError if triton is already imported without TRITON_INTERPRET: its own library functions
    are then compiled ones, and an interpreted kernel that calls them fails.
    """
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("triton was imported before TRITON_INTERPRET=1 was set; set it in the environment first")
    os.environ["TRITON_INTERPRET"] = "1"
    # Nothing is compiled in this process from now on: this silences the warning of 3.9 and decides nothing.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "0")


def launch(
    kernel: JITFunction[...],
    grid: tuple[int, ...],
    arguments: Mapping[str, Any],
    *,
    num_warps: int = 4,
    num_stages: int = 2,
) -> None:
    """Run a `@triton.jit` kernel over `grid`: in the interpreter if a tensor among `arguments` is on the CPU.

    `arguments` maps every parameter of the kernel to its value. Compiled kernels run without contraction
    of a*b - c into one fused operation: the kernels here subtract a rounded maximum, and the unrounded
    product may exceed it by enough to overflow exp.

    Raises NotImplementedError for bfloat16 if this Triton's interpreter cannot be repaired.
    """
    from triton.runtime.interpreter import InterpretedFunction

    tensors = [value for value in arguments.values() if hasattr(value, "data_ptr")]
    on_cpu = any(tensor.device.type == "cpu" for tensor in tensors)
    if not on_cpu and not isinstance(kernel, InterpretedFunction):
        kernel[grid](**arguments, num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=False)
        return
    with ExitStack() as scope:
        # A GPU raises no floating-point warnings: exp(-inf) and log(0) are ordinary values here.
        scope.enter_context(np.errstate(all="ignore"))
        scope.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "All-NaN", RuntimeWarning)
        # 3.6 makes loop bounds of one-element arrays, which numpy 2.3 deprecates and 2.4 refuses.
        warnings.filterwarnings("ignore", "Conversion of an array with ndim > 0", DeprecationWarning)
        if any(str(tensor.dtype) == "torch.bfloat16" for tensor in tensors):
            scope.enter_context(repaired_bf16())
        _interpreted(kernel.fn)[grid](**arguments)


@cache
def _interpreted(function: FunctionType) -> InterpretedFunction:
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    names = function.__globals__
    called = {name: names[name] for name in function.__code__.co_names if isinstance(names.get(name), JITFunction)}
    if called:
        inside = names | {name: _interpreted(callee.fn) for name, callee in called.items()}
        function = FunctionType(function.__code__, inside, function.__name__, function.__defaults__)
    return InterpretedFunction(function)


def widen(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The values of bfloat16 bit patterns, exactly."""
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow(values: ArrayLike) -> NDArray[np.uint16]:
    """Bit patterns of the bfloat16 numbers nearest to `values`, ties to even, every NaN quiet."""
    given: NDArray[Any] = np.asarray(values)
    if given.dtype.itemsize > 2 and given.dtype != np.float32:
        wide = given.astype(np.float64)
        nearest = wide.astype(np.float32)
        given = _odd(nearest, wide - nearest)
    single = given.astype(np.float32)
    bits = single.view(np.uint32)
    tie_to_even = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + tie_to_even) >> np.uint32(16)
    return np.where(np.isnan(single), np.uint32(0x7FC0), rounded).astype(np.uint16)


def fused_multiply_add(x: NDArray[np.uint16], y: NDArray[np.uint16], z: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """x * y + z on bfloat16 patterns with one rounding."""
    addend = widen(z).astype(np.float64)
    product = widen(x).astype(np.float64) * widen(y)  # exact: 16 bits, exponents far inside float64's
    total = product + addend
    back = total - product
    return narrow(_odd(total, (product - (total - back)) + (addend - back)))  # Knuth's exact error of a sum


def _odd(nearest: FloatArray, error: FloatArray) -> FloatArray:
    """Round `nearest + error` to odd, where `nearest` is that sum rounded to nearest."""
    bits: NDArray[np.integer] = nearest.view(np.int32 if nearest.dtype == np.float32 else np.int64)
    outward = (error > 0) != np.signbit(nearest)
    step = np.where(outward, 1, -1).astype(bits.dtype)  # patterns are ordered by magnitude
    wrong = np.isfinite(error) & (error != 0) & ((bits & 1) == 0)
    return np.where(wrong, bits + step, bits).view(nearest.dtype)


@contextmanager
def repaired_bf16() -> Iterator[None]:
    """Within this block the interpreter calculates with bfloat16 correctly; see the module's docstring.

    Raises NotImplementedError where Triton's version or internals are not those this was written for.
    """
    import triton

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if not FIRST_VERSION <= version <= LAST_VERSION:
        raise NotImplementedError(
            f"bf16 in the interpreter of Triton {triton.__version__}: its internals are known for 3.6 to 3.9"
        )
    try:
        replacements = _replacements()
    except AttributeError as missing:
        raise NotImplementedError(f"bf16 in this interpreter: no internal {missing}") from missing
    originals = [(owner, name, vars(owner).get(name)) for owner, name, _ in replacements]
    try:
        for owner, name, function in replacements:
            setattr(owner, name, function)
        if not _self_check():
            raise NotImplementedError(f"bf16 in the interpreter of Triton {triton.__version__}: self-check failed")
        yield
    finally:
        for owner, name, original in originals:
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def _replacements() -> list[tuple[type, str, Callable[..., object]]]:
    """(class, method name, repaired method); each falls through to the original where no bfloat16 occurs."""
    import triton.language as tl
    from triton.runtime import interpreter as it

    builder, reduce, scan = it.InterpreterBuilder, it.ReduceOps, it.ScanOps
    handle, bf16 = it.TensorHandle, tl.bfloat16
    cast, to_float, binary, unary = (
        builder.cast_impl, builder.create_fp_to_fp, builder.binary_op, builder.unary_op
    )  # fmt: skip
    ternary, fma, dot = builder.ternary_op, builder.create_fma, builder.create_dot
    total, extreme, cumsum, cumprod = reduce.sum, reduce.min_max, scan.cumsum, scan.cumprod

    def is_bf16(*operands: TensorHandle | tl.tensor) -> bool:
        return any(getattr(operand.dtype, "scalar", operand.dtype) == bf16 for operand in operands)

    def values(operand: TensorHandle) -> StoredArray:
        return widen(operand.data) if is_bf16(operand) else operand.data

    def get_bf16(
        self: InterpreterBuilder, value: float
    ) -> TensorHandle:  # constants; before 3.9 the interpreter has no such method
        return handle(narrow(np.array([value], np.float32)), bf16)

    def cast_impl(self: InterpreterBuilder, source: TensorHandle, target: tl.dtype) -> TensorHandle:
        kinds = (source.dtype.scalar, target.scalar)
        if bf16 not in kinds or kinds[0] == kinds[1]:
            return cast(self, source, target)
        if any(kind.is_fp8() for kind in kinds):
            raise NotImplementedError("conversion between float8 and bfloat16 in the interpreter")
        if kinds[1] == bf16:
            return handle(narrow(source.data), bf16)
        return handle(widen(source.data).astype(it._get_np_dtype(target)), kinds[1])

    def create_fp_to_fp(
        self: InterpreterBuilder, source: TensorHandle, target: tl.dtype, rounding: ROUNDING_MODE | None
    ) -> TensorHandle:
        if bf16 not in (source.dtype.scalar, target.scalar):
            return to_float(self, source, target, rounding)
        if rounding not in (None, it._ir.ROUNDING_MODE.RTNE):
            raise NotImplementedError(f"rounding mode {rounding} to bfloat16 in the interpreter")
        return cast_impl(self, source, target)

    def binary_op(self: InterpreterBuilder, lhs: TensorHandle, rhs: TensorHandle, op: np.ufunc) -> TensorHandle:
        if not is_bf16(lhs, rhs):
            return binary(self, lhs, rhs, op)
        result = op(values(lhs), values(rhs))
        # A comparison's truth values must not be labelled bfloat16: a cast would take them for patterns.
        return handle(result, tl.int1) if result.dtype == np.bool_ else handle(narrow(result), bf16)

    def unary_op(self: InterpreterBuilder, arg: TensorHandle, op: np.ufunc) -> TensorHandle:
        return handle(narrow(op(values(arg))), bf16) if is_bf16(arg) else unary(self, arg, op)

    def ternary_op(
        self: InterpreterBuilder, x: TensorHandle, y: TensorHandle, z: TensorHandle, op: Callable[..., StoredArray]
    ) -> TensorHandle:
        if not is_bf16(z) or op is np.where:  # a selection moves patterns
            return ternary(self, x, y, z, op)
        return handle(narrow(op(values(x), values(y), values(z))), bf16)

    def create_fma(self: InterpreterBuilder, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        return handle(fused_multiply_add(x.data, y.data, z.data), bf16) if is_bf16(z) else fma(self, x, y, z)

    def create_dot(
        self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle, *options: object
    ) -> TensorHandle:
        if is_bf16(d):
            raise NotImplementedError("a bfloat16 accumulator in the interpreter")
        a, b = (handle(values(side), tl.float32) if is_bf16(side) else side for side in (a, b))
        return dot(self, a, b, d, *options)

    def reduce_sum(self: ReduceOps, tensor: tl.tensor) -> tl.tensor:
        if not is_bf16(tensor):
            return total(self, tensor)
        wide = widen(tensor.handle.data)
        return self.to_tensor(narrow(np.sum(wide, axis=self.axis, keepdims=self.keep_dims)), bf16)

    def min_max(
        self: ReduceOps, tensor: tl.tensor, val_reduce_op: np.ufunc, idx_reduce_op: np.ufunc | None = None
    ) -> tl.tensor:
        tensor = tensor[0] if isinstance(tensor, tuple) else tensor
        if not is_bf16(tensor):
            return extreme(self, tensor, val_reduce_op, idx_reduce_op)
        options = {"axis": self.axis, "keepdims": self.keep_dims}
        wide = widen(tensor.handle.data)
        found = [self.to_tensor(narrow(val_reduce_op(wide, **options)), bf16)] if val_reduce_op else []
        if idx_reduce_op:
            found.append(self.to_tensor(idx_reduce_op(wide, **options), tl.int32))
        return found[0] if len(found) == 1 else tuple(found)

    def running(original: Method, op: Callable[..., StoredArray]) -> Method:
        def method(self: ScanOps, tensor: tl.tensor) -> object:
            if not is_bf16(tensor):
                return original(self, tensor)
            return [self.to_tensor(narrow(op(widen(tensor.handle.data), axis=self.axis)), bf16)]

        return method

    def refusing(original: Method, what: str) -> Method:
        def method(self: InterpreterBuilder, *args: object, **kwargs: object) -> object:
            if is_bf16(*(arg for arg in args if isinstance(arg, handle) and not arg.dtype.is_ptr())):
                raise NotImplementedError(f"{what} on bfloat16 in the interpreter")
            return original(self, *args, **kwargs)

        return method

    refused = {"create_atomic_rmw": "an atomic operation", "create_atomic_cas": "an atomic operation"}
    if hasattr(builder, "create_dot_scaled"):  # absent in 3.6
        refused["create_dot_scaled"] = "a scaled dot"
    repaired = (get_bf16, cast_impl, create_fp_to_fp, binary_op, unary_op, ternary_op, create_fma, create_dot)
    return [
        *((builder, method.__name__, method) for method in repaired),
        *((builder, name, refusing(getattr(builder, name), what)) for name, what in refused.items()),
        (reduce, "sum", reduce_sum),
        (reduce, "min_max", min_max),
        (scan, "cumsum", running(cumsum, np.cumsum)),
        (scan, "cumprod", running(cumprod, np.cumprod)),
    ]


@cache
def _self_check() -> bool:
    """Whether the interpreter's own entry points reach the repaired methods, on values that tell."""
    import triton.language as tl
    from triton.runtime import interpreter as it

    def bf16(value: float) -> TensorHandle:
        return it.TensorHandle(narrow(np.full((1, 1), value)), tl.bfloat16)

    b, zero = it.interpreter_builder, it.TensorHandle(np.zeros((1, 1), np.float32), tl.float32)
    narrowed = b.create_fp_trunc(it.TensorHandle(np.array([1 + 2**-7 + 2**-8], np.float32), tl.float32), tl.bfloat16)
    return bool(
        narrowed.data.tolist() == narrow(np.array([1 + 2**-6])).tolist()
        and b.create_fp_ext(bf16(-3.0), tl.float32).data.tolist() == [[-3.0]]
        and b.create_fadd(bf16(1.5), bf16(-4.0)).data.tolist() == bf16(-2.5).data.tolist()
        and b.create_fmul(bf16(1.5), bf16(-4.0)).data.tolist() == bf16(-6.0).data.tolist()
        and b.create_fcmpOLT(bf16(-4.0), bf16(1.5)).data.tolist() == [[True]]
        and b.create_dot(bf16(1.5), bf16(-4.0), zero, None, 0).data.tolist() == [[-6.0]]
    )
