"""The Triton kernels compile for sm_80 and sm_90 without a GPU, and use the instructions they claim."""

import pytest

from targets.triton_compile import POINTERS, Build, compile_kernels

H100_SHARED_BYTES, A100_SHARED_BYTES = 232448, 166912  # the most that one block may ask for
EVERYDAY = [
    Build("attention", dtype, arch, is_causal=is_causal)
    for arch in (80, 90)
    for dtype in POINTERS
    for is_causal in (False, True)
]
UNUSUAL = [
    Build("attention", "fp32", 80, head_dim=17, value_dim=200),
    Build("attention", "bf16", 90, head_dim=256, value_dim=256, is_causal=True),
    Build("attention", "fp16", 80, head_dim=1, value_dim=1, is_causal=True, all_ones=True),
    Build("rope", "fp32", 80),
    Build("rope", "fp16", 90, layout="interleaved", head_dim=80),
    Build("rope", "bf16", 80, all_ones=True),
]
ATTENTION = [build for build in EVERYDAY + UNUSUAL if build.kernel == "attention"]


@pytest.fixture(scope="module")
def binaries():
    builds = EVERYDAY + UNUSUAL
    return dict(zip(builds, compile_kernels(builds), strict=True))


@pytest.mark.parametrize("build", EVERYDAY + UNUSUAL, ids=str)
def test_makes_machine_code(build, binaries):
    binary = binaries[build]
    assert binary.build == build
    assert binary.ptx_bytes > 1000 and binary.cubin_bytes > 1000
    assert 16 <= binary.registers <= 255 and binary.stack_bytes < 1024
    assert binary.shared_bytes <= (A100_SHARED_BYTES if build.arch == 80 else H100_SHARED_BYTES)


@pytest.mark.parametrize("build", ATTENTION, ids=str)
def test_products_have_the_precision_that_the_contract_says(build, binaries):
    engine = [code for code in binaries[build].opcodes if code.startswith(("mma.", "wgmma.mma_async"))]
    if build.dtype == "fp32":
        assert not engine and not any("tf32" in code for code in binaries[build].opcodes)
    else:
        operand = {"fp16": "f32.f16.f16", "bf16": "f32.bf16.bf16"}[build.dtype]  # accumulates in float32
        assert engine and all(operand in code for code in engine)


@pytest.mark.parametrize("build", [build for build in ATTENTION if build.dtype != "fp32"], ids=str)
def test_nothing_is_contracted(build, binaries):
    """With fusion allowed, l e^(m-m') + sum p becomes one fma; the log's own fma is the flushing kind."""
    assert "fma.rn.ftz.f32" in binaries[build].opcodes
    assert "fma.rn.f32" not in binaries[build].opcodes


@pytest.mark.parametrize("build", [build for build in UNUSUAL if build.kernel == "rope"], ids=str)
def test_angles_are_reduced(build, binaries):
    codes = binaries[build].opcodes
    assert not any(code.startswith(("cos.approx", "sin.approx")) for code in codes)
    assert "cvt.rn.f32.s64" in codes  # the position reaches float32 in one rounding


def test_a_failure_says_what_the_compiler_said():
    with pytest.raises(RuntimeError, match="Triton did not compile"):
        compile_kernels([Build("rope", "fp32", 90, head_dim=0)])
    with pytest.raises(ValueError, match="fp64"):
        compile_kernels([Build("attention", "fp64", 90)])
    with pytest.raises(ValueError, match="softmax"):
        compile_kernels([Build("softmax", "fp32", 90)])
