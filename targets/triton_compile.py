"""Compile the Triton kernels for NVIDIA GPUs on a machine that has none.

An interpreter accepts kernels that no GPU takes (types that change in a loop, tiles that exceed shared
memory). Triton's compiler needs no device: `compile_kernels` runs it, down to the machine code that ptxas
assembles, and reports what the code needs. It works in a fresh process, because a process in which
TRITON_INTERPRET was set when triton was imported can no longer compile, and with an empty cache, because a
hit would prove nothing.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

KERNELS = ("attention", "rope")
POINTERS = {"fp32": "*fp32", "fp16": "*fp16", "bf16": "*bf16"}
OPCODE = r"^\s+(?:@!?%p\d+\s+)?([a-z]\w*(?:\.\w+|::\w+)*)[\s;]"


@dataclass(frozen=True, slots=True)
class Build:
    """What to compile: `kernel` of KERNELS, `dtype` a key of POINTERS, `arch` 80 or 90 for sm_80 or sm_90."""

    kernel: str
    dtype: str
    arch: int
    head_dim: int = 64
    value_dim: int = 64  # attention only
    is_causal: bool = False  # attention only
    layout: str = "half"  # rope only
    all_ones: bool = False  # every size and stride is 1: Triton's launcher turns such arguments into constants


@dataclass(frozen=True, slots=True)
class Binary:
    """Sizes in bytes of PTX text, cubin and a block's shared memory; registers and stack bytes of a thread.

    `opcodes` are the distinct PTX instructions: `mma...` or `wgmma...` where a matrix engine is used,
    `...tf32` if it rounds float32 operands, `cos.approx` or `sin.approx` if angles go unreduced.
    """

    build: Build
    ptx_bytes: int
    cubin_bytes: int
    shared_bytes: int
    registers: int
    stack_bytes: int
    opcodes: tuple[str, ...]


def compile_kernels(builds: Sequence[Build], *, timeout_s: float = 300.0) -> list[Binary]:
    """Compile every build in one new process, in order; 1 to 8 s each.

    Raises ValueError for an unknown kernel or dtype, RuntimeError with the compiler's words if it fails, and
    subprocess.TimeoutExpired after `timeout_s` seconds.
    """
    for build in builds:
        if build.kernel not in KERNELS or build.dtype not in POINTERS:
            raise ValueError(f"kernel must be one of {KERNELS}, dtype one of {tuple(POINTERS)}; got {build}")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    with tempfile.TemporaryDirectory(prefix="attn-oracle-triton-") as cache:
        run = subprocess.run(
            [sys.executable, "-m", "targets.triton_compile"],
            input=json.dumps([asdict(build) for build in builds]),
            env=environment | {"TRITON_CACHE_DIR": cache},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    if run.returncode:
        raise RuntimeError(f"Triton did not compile the kernels:\n{run.stderr[-4000:]}")
    rows = json.loads(run.stdout.splitlines()[-1])
    return [Binary(**(row | {"build": Build(**row["build"]), "opcodes": tuple(row["opcodes"])})) for row in rows]


def _compile(build: Build) -> Binary:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, signature, constants, options = _source(build)
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    options = options | {"enable_fp_fusion": False}  # as in launch; the default depends on Triton's version
    compiled = triton.compile(source, target=GPUTarget("cuda", build.arch, 32), options=options)
    ptx, cubin = compiled.asm["ptx"], compiled.asm["cubin"]
    usage = _resource_usage(cubin)
    return Binary(
        build=build,
        ptx_bytes=len(ptx),
        cubin_bytes=len(cubin),
        shared_bytes=compiled.metadata.shared,
        registers=usage["REG"],
        stack_bytes=usage["STACK"],
        opcodes=tuple(sorted(set(re.findall(OPCODE, ptx, re.MULTILINE)))),
    )


def _source(build: Build) -> tuple[Any, dict[str, str], dict[tuple[int], Any], dict[str, Any]]:
    """(kernel, type of every parameter, compile-time values by index of the parameter, launch options)."""
    pointer = POINTERS[build.dtype]
    if build.kernel == "attention":
        from targets.triton_flash import attention_arguments, attention_kernel, attention_options

        kernel, options = attention_kernel, attention_options(build.head_dim, build.value_dim)
        constants = attention_arguments(build.head_dim, build.value_dim, is_causal=build.is_causal, return_lse=True)
        special = {"lse_ptr": "*fp32", "scale": "fp32"}
    else:
        from targets.triton_rope import rope_arguments, rope_kernel

        kernel, options = rope_kernel, {"num_warps": 4, "num_stages": 2}
        constants = rope_arguments(build.head_dim, build.head_dim, layout=build.layout)
        special = {"positions_ptr": "*i64", "frequencies_ptr": "*fp32"}
    signature = {name: special.get(name, pointer if name.endswith("_ptr") else "i32") for name in kernel.arg_names}
    if build.all_ones:
        constants |= {name: 1 for name, kind in signature.items() if kind == "i32" and name not in constants}
    signature |= dict.fromkeys(constants, "constexpr")
    indices = {name: index for index, name in enumerate(kernel.arg_names)}
    return kernel, signature, {(indices[name],): value for name, value in constants.items()}, options


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """REG, STACK, SHARED, LOCAL as NVIDIA's cuobjdump, which Triton brings along, reads them from a cubin."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", text)}


def main() -> None:
    """Read builds as JSON from standard input, write binaries as one line of JSON to standard output."""
    builds = [Build(**row) for row in json.load(sys.stdin)]
    sys.stdout.write(json.dumps([asdict(_compile(build)) for build in builds]) + "\n")


if __name__ == "__main__":
    main()
