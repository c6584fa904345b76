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

KERNELS = (
    "attention", "attention_delta", "attention_dkdv", "attention_dq", "mla_project", "mla_project_out", "mla_split",
    "mla_merge", "rope",
)  # fmt: skip
# Compile-time switches of the attention kernels, by option; "paged" has pages of 16.
FEATURES: dict[str, dict[str, Any]] = {
    "causal": {"BOUND_RIGHT": True},
    "window": {"BOUND_LEFT": True, "BOUND_RIGHT": True},
    "softcap": {"CAP": True},
    "alibi": {"ALIBI": True},
    "mask": {"MASK": 1},
    "bias": {"MASK": 2},
    "sinks": {"SINKS": True},
    "varlen": {"LAYOUT": 1},
    "paged": {"LAYOUT": 2, "PAGE": 16},
}
POINTERS = {"fp32": "*fp32", "fp16": "*fp16", "bf16": "*bf16"}
OPCODE = r"^\s+(?:@!?%p\d+\s+)?([a-z]\w*(?:\.\w+|::\w+)*)[\s;]"


@dataclass(frozen=True, slots=True)
class Build:
    """What to compile: `kernel` of KERNELS, `dtype` a key of POINTERS, `arch` 80 or 90 for sm_80 or sm_90.

    `features` are keys of FEATURES, for attention's kernels. For mla_split and mla_merge head_dim is d_c, value_dim is
    d_r. mla_project reads q^C in the dtype, mla_project_out float32 latents.
    """

    kernel: str
    dtype: str
    arch: int
    head_dim: int = 64
    value_dim: int = 64  # attention only
    features: tuple[str, ...] = ()
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
        if build.kernel not in KERNELS or build.dtype not in POINTERS or not {*build.features} <= {*FEATURES}:
            known = f"kernel {KERNELS}, dtype {tuple(POINTERS)}, features {tuple(FEATURES)}"
            raise ValueError(f"each of a build must be one of {known}; got {build}")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[3]), *filter(None, sys.path)])
    with tempfile.TemporaryDirectory(prefix="attn-oracle-triton-") as cache:
        run = subprocess.run(
            [sys.executable, "-m", "targets.builtin.triton.compile"],
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
    return [Binary(**(row | {"build": _build(row["build"]), "opcodes": tuple(row["opcodes"])})) for row in rows]


def _build(row: dict[str, Any]) -> Build:
    return Build(**(row | {"features": tuple(row["features"])}))


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


def _source(build: Build) -> tuple[object, dict[str, str], dict[tuple[int], object], dict[str, object]]:
    """(kernel, type of every parameter, compile-time values by index of the parameter, launch options)."""
    pointer = POINTERS[build.dtype]
    special: dict[str, str] = {}
    if build.kernel.startswith("attention"):
        kernel, constants, options = _attention(build)
        floats = dict.fromkeys(
            ("lse_ptr", "delta_ptr", "dbias_ptr", "dlse_ptr", "dsink_ptr", "slopes_ptr", "sinks_ptr"), "*fp32"
        )
        indices = dict.fromkeys(("starts_q_ptr", "starts_k_ptr", "pages_ptr"), "*i32")
        mask = {"mask_ptr": "*u8" if constants.get("MASK") == 1 else pointer}
        special = floats | indices | mask | {"scale": "fp32", "softcap": "fp32"}
    elif build.kernel == "mla_split":
        from targets.builtin.triton.mla import SPLIT_OPTIONS, split_arguments, split_kernel

        kernel, options = split_kernel, SPLIT_OPTIONS
        constants = split_arguments(build.head_dim, build.value_dim, is_causal="causal" in build.features)
        special = {"part_ptr": "*fp32", "lse_ptr": "*fp32", "scale": "fp32"}
    elif build.kernel.startswith("mla_project"):
        from targets.builtin.triton.mla import PROJECT_ARGUMENTS, project_kernel, project_options

        of_latents = build.kernel == "mla_project_out"
        options = project_options(widened=of_latents and build.dtype != "fp32")
        kernel, constants, special = project_kernel, dict(PROJECT_ARGUMENTS), {"x_ptr": "*fp32"} if of_latents else {}
    elif build.kernel == "mla_merge":
        from targets.builtin.triton.mla import merge_arguments, merge_kernel

        kernel, constants, options = merge_kernel, merge_arguments(build.head_dim), {"num_warps": 4, "num_stages": 2}
        special = dict.fromkeys(("part_ptr", "split_lse_ptr", "latent_ptr", "lse_ptr"), "*fp32")
    else:
        from targets.builtin.triton.rope import rope_arguments, rope_kernel

        kernel, options = rope_kernel, {"num_warps": 4, "num_stages": 2}
        constants = rope_arguments(build.head_dim, build.head_dim, layout=build.layout)
        special = {"positions_ptr": "*i64", "frequencies_ptr": "*fp32", "cos_size": "fp32", "sin_size": "fp32"}
    signature = {name: special.get(name, pointer if name.endswith("_ptr") else "i32") for name in kernel.arg_names}
    if build.all_ones:
        constants |= {name: 1 for name, kind in signature.items() if kind == "i32" and name not in constants}
    signature |= dict.fromkeys(constants, "constexpr")
    places = {name: index for index, name in enumerate(kernel.arg_names)}
    return kernel, signature, {(places[name],): value for name, value in constants.items()}, options


def _attention(build: Build) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """(kernel, compile-time values, launch options) of one of attention's kernels."""
    from targets.builtin.triton import flash_backward as backward
    from targets.builtin.triton import flash_forward as forward

    dims = build.head_dim, build.value_dim
    switches: dict[str, object] = {"BOUND_LEFT": False, "BOUND_RIGHT": False, "CAP": False, "ALIBI": False, "MASK": 0}
    own = {"SINKS": False, "LAYOUT": 0, "PAGE": 1}
    for feature in build.features:
        for name, value in FEATURES[feature].items():
            (own if name in own else switches)[name] = value
    if build.kernel == "attention":
        return (
            forward.attention_kernel,
            forward.attention_arguments(*dims, switches) | own,
            forward.attention_options(*dims),
        )
    if build.kernel == "attention_delta":
        constants = backward.backward_arguments(*dims, {"SINKS": own["SINKS"], "HAS_DLSE": True})
        constants = {name: constants[name] for name in ("VALUE_DIM", "VALUE_PAD", "SINKS", "HAS_DLSE", "TILE_Q")}
        return backward.delta_kernel, constants, {"num_warps": 4, "num_stages": 2}
    kernel = backward.dkdv_kernel if build.kernel == "attention_dkdv" else backward.dq_kernel
    constants = backward.backward_arguments(*dims, switches)
    if build.kernel == "attention_dq":
        constants["DBIAS"] = switches["MASK"] == 2
    return kernel, constants, backward.backward_options(*dims)


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
    builds = [_build(row) for row in json.load(sys.stdin)]
    sys.stdout.write(json.dumps([asdict(_compile(build)) for build in builds]) + "\n")


if __name__ == "__main__":
    main()
