"""The Triton kernels compile for sm_80 and sm_90 without a GPU, and use the instructions they claim."""

import pytest

from targets.builtin.triton.compile import POINTERS, Build, compile_kernels

H100_SHARED_BYTES, A100_SHARED_BYTES = 232448, 166912  # the most that one block may ask for
EVERYDAY = [
    Build("attention", dtype, arch, features=features)
    for arch in (80, 90)
    for dtype in POINTERS
    for features in ((), ("causal",))
]
SCORES = ("window", "softcap", "alibi", "bias")
OPTIONS = [
    Build("attention", "bf16", 80, features=(*SCORES, "sinks")),
    Build("attention", "fp32", 90, features=("bias", "varlen", "sinks"), head_dim=128),
    Build("attention", "fp16", 90, features=("paged", "causal", "softcap", "mask"), head_dim=128, value_dim=128),
    Build("attention_delta", "bf16", 90, features=("sinks",), value_dim=80),
    *(
        Build(kernel, dtype, arch, features=features, head_dim=dim, value_dim=dim)
        for kernel in ("attention_dkdv", "attention_dq")
        for dtype, arch, features, dim in (
            ("bf16", 90, ("causal",), 64), ("fp16", 80, SCORES, 128), ("fp32", 80, (), 64), ("fp32", 90, ("mask",), 256)
        )
    ),
]  # fmt: skip
UNUSUAL = [
    Build("attention", "fp32", 80, head_dim=17, value_dim=200),
    Build("attention", "bf16", 90, head_dim=256, value_dim=256, features=("causal",)),
    Build("attention", "fp16", 80, head_dim=1, value_dim=1, features=("causal",), all_ones=True),
    Build("attention_dkdv", "fp16", 80, features=SCORES, all_ones=True),
    Build("mla_split", "bf16", 90, head_dim=512, value_dim=64, features=("causal",)),
    Build("mla_split", "fp32", 80, head_dim=128, value_dim=32),
    *(
        Build(name, dtype, arch)
        for name in ("mla_project", "mla_project_out")
        for dtype, arch in (("bf16", 90), ("fp16", 80), ("fp32", 80))
    ),
    Build("mla_project", "bf16", 80, all_ones=True),
    Build("mla_merge", "fp32", 80, head_dim=512),
    Build("mla_merge", "fp32", 90, head_dim=100, all_ones=True),
    Build("rope", "fp32", 80),
    Build("rope", "fp16", 90, layout="interleaved", head_dim=80),
    Build("rope", "bf16", 80, all_ones=True),
]
ALL = EVERYDAY + OPTIONS + UNUSUAL
WITHOUT_DOTS = ("attention_delta", "mla_merge", "rope")
DOTS = [build for build in ALL if build.kernel not in WITHOUT_DOTS]
LOGS = [build for build in EVERYDAY + UNUSUAL if build.kernel == "attention" and build.dtype != "fp32"]


@pytest.fixture(scope="module")
def binaries():
    return dict(zip(ALL, compile_kernels(ALL), strict=True))


@pytest.mark.parametrize("build", ALL, ids=str)
def test_makes_machine_code(build, binaries):
    binary = binaries[build]
    assert binary.build == build
    assert binary.ptx_bytes > 1000 and binary.cubin_bytes > 1000
    assert 16 <= binary.registers <= 255 and binary.stack_bytes < 1024
    assert binary.shared_bytes <= (A100_SHARED_BYTES if build.arch == 80 else H100_SHARED_BYTES)


@pytest.mark.parametrize("build", DOTS, ids=str)
def test_products_have_the_precision_that_the_contract_says(build, binaries):
    engine = [code for code in binaries[build].opcodes if code.startswith(("mma.", "wgmma.mma_async"))]
    if build.dtype == "fp32" or build.kernel == "mla_project_out":
        assert not engine and not any("tf32" in code for code in binaries[build].opcodes)
    else:
        operand = {"fp16": "f32.f16.f16", "bf16": "f32.bf16.bf16"}[build.dtype]  # accumulates in float32
        assert engine and all(operand in code for code in engine)


@pytest.mark.parametrize("build", LOGS, ids=str)
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
    with pytest.raises(ValueError, match="dropout"):
        compile_kernels([Build("attention", "fp32", 90, features=("dropout",))])
    with pytest.raises(ValueError, match="softmax"):
        compile_kernels([Build("softmax", "fp32", 90)])
