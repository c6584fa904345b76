"""The command: what it refuses and how, which exit code a run's verdicts give, and that it runs anywhere."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from meta_tests.kernels.command import PLAIN, attn_oracle
from oracle.case import Case, save_case

PROGRAM = [sys.executable, "-m", "reports.command.cli"]


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    path = tmp_path / "kernel.py"
    path.write_text(PLAIN)
    return path


# --- requests that cannot be carried out ------------------------------------------------------------------------------

KERNEL = "KERNEL:attention"
WRONG_USE: dict[str, tuple[list[str], str]] = {
    "target": (["nosuch"], "unknown target 'nosuch'; known: sdpa_math"),
    "file": (["nosuch.py:f"], "no file 'nosuch.py'"),
    "function": (["KERNEL:nosuch"], "has no 'nosuch'; it has: attention"),
    "no function": (["KERNEL"], "names no function"),
    "module": (["no.such.module:f"], "no module 'no.such.module'"),
    "not callable": (["KERNEL:torch.__name__"], "is str, not a function"),
    "no signature": (["KERNEL:torch.softmax"], "--op"),
    "op": ([KERNEL, "--op", "nosuch"], "unknown op 'nosuch'; known: attention, attention_backward"),
    "op of a built-in": (["sdpa_math", "--op", "rope"], "sdpa_math is of op attention, not rope"),
    "dtype": ([KERNEL, "--dtype", "fp8"], "unknown dtype 'fp8'; known: fp64, fp32, fp16, bf16"),
    "undeclared dtype": (["eager_attention_fp32", "--dtype", "fp64"], "declares no fp64; it takes fp32, fp16, bf16"),
    "device": ([KERNEL, "--device", "tpu"], "unknown device 'tpu'; known: cpu, cuda, cuda:N"),
    "device number": ([KERNEL, "--device", "cuda:x"], "unknown device 'cuda:x'"),
    "device of a target": (["sdpa_cudnn"], "sdpa_cudnn runs on cuda, not on cpu"),
    "contract": ([KERNEL, "--contract", "flsh"], "unknown contract 'flsh' for attention; known: fp64, fp32, flash"),
    "convention": ([KERNEL, "--convention", "alignment=top_left"], "unknown convention 'alignment' for attention"),
    "convention value": ([KERNEL, "--convention", "lse_base=10"], "'10' of convention lse_base; known: e, 2"),
    "convention form": ([KERNEL, "--convention", "lse_base"], "--convention takes NAME=VALUE"),
    "property": ([KERNEL, "--property", "P99"], "unknown property 'P99' of attention; known:"),
    "profile": ([KERNEL, "--profile", "slow"], "invalid choice: 'slow'"),
    "timeout": ([KERNEL, "--timeout", "0"], "--timeout takes a positive number"),
    "workers": ([KERNEL, "--workers", "-1"], "--workers takes a number from 0"),
    "case": ([KERNEL, "--property", "P1", "--case", "nosuch.json"], "cannot read case nosuch.json"),
    "json": ([KERNEL, "--json", "nosuch/x.json"], "cannot write nosuch/x.json"),
    "out": ([KERNEL, "--out", "KERNEL"], "cannot write records to"),
    "command": (["--frobnicate"], "unrecognized arguments"),
}


@pytest.mark.parametrize("name", WRONG_USE)
def test_wrong_use_is_said_in_one_line_and_gives_code_two(
    name: str, kernel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words, message = WRONG_USE[name]
    code, printed = attn_oracle("verify", *(w.replace("KERNEL", str(kernel)) for w in words))
    assert code == 2
    last = printed.strip().splitlines()[-1]
    assert last.startswith("attn-oracle")
    assert message in last, printed
    assert "Traceback" not in printed
    assert not list((tmp_path / "out").glob("records-gw*"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import nonexistent_module", "ModuleNotFoundError: No module named 'nonexistent_module'"),
        ("def f(q k):", "SyntaxError"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
        ("def f(q, k, v, positions): pass", "required parameter 'positions' is unknown; attention knows alibi_slopes,"),
        ("def f(a, b): pass", "f(a, b) fits no op; name one with --op: attention, attention_backward"),
        ("def softmax(x, dim): pass\nf = softmax", "required parameter 'dim' is unknown; softmax knows x"),
        ("def f(q, k, v): pass\nf.__attn_oracle__ = {'dtypes': 'fp32'}", "dtypes must be a tuple"),
        ("class f:\n    def __init__(self, heads): pass", "is a class whose instances need heads"),
    ],
)
def test_a_file_that_cannot_be_used_is_said_in_one_line(source: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(source)
    code, printed = attn_oracle("verify", f"{tmp_path / 'bad.py'}:f", "--out", tmp_path / "out")
    assert code == 2
    assert printed.count("\n") == 1
    assert message in printed
    assert not (tmp_path / "out").exists()


def test_a_case_must_fit_what_it_is_replayed_on(kernel: Path, tmp_path: Path) -> None:
    x = np.ones((2, 4), dtype=np.float32)
    save_case(Case("softmax", {"x": x}), tmp_path / "cases" / "rows")
    q = np.ones((1, 1, 2, 4), dtype=np.float32)
    save_case(Case("attention", {"q": q, "k": q, "v": q}), tmp_path / "cases" / "heads")
    spec = f"{kernel}:attention"
    for words, message in (
        (["rows.json", spec, "--property", "P1"], "the saved case is of op softmax, attention of attention"),
        (["heads.json", spec], "--case needs a TARGET and a --property"),
        (["heads.json", "--property", "P1"], "--case needs a TARGET and a --property"),
        (["heads.json", spec, "--property", "P1", "--dtype", "bf16"], "is in fp32, not in bf16"),
    ):
        code, printed = attn_oracle("verify", *words[1:], "--case", tmp_path / "cases" / words[0])
        assert (code, message in printed) == (2, True), printed
    torn = tmp_path / "cases" / "heads.safetensors"
    torn.write_bytes(torn.read_bytes()[:-5])
    code, printed = attn_oracle("verify", spec, "--property", "P1", "--case", tmp_path / "cases" / "heads.json")
    assert code == 2
    assert "cannot read case" in printed
    assert printed.count("\n") == 1


def test_report_refuses_what_is_no_run(tmp_path: Path) -> None:
    assert attn_oracle("report", tmp_path / "nosuch")[0] == 2
    code, printed = attn_oracle("report", tmp_path)
    assert code == 2
    assert "has no record files" in printed


def test_targets_lists_what_there_is() -> None:
    code, printed = attn_oracle("targets", "seed_rope_numpy", "sdpa_cudnn", "--json")
    rows = {row["name"]: row for row in json.loads(printed)}
    assert code == 0
    assert rows["seed_rope_numpy"] == {
        "name": "seed_rope_numpy",
        "origin": "own",
        "op": "rope",
        "dtypes": ["fp32", "fp16", "bf16"],
        "devices": ["cpu"],
        "options": ["base", "layout", "scaling"],
        "description": rows["seed_rope_numpy"]["description"],
    }
    assert rows["sdpa_cudnn"]["devices"] == ["cuda"]


def test_targets_that_do_not_conform_are_said_so(tmp_path: Path) -> None:
    short = "\n\ndef short(q, k, v):\n    return attention(q, k, v)[..., :-1]\n"
    (tmp_path / "kernel.py").write_text(PLAIN + short)
    code, printed = attn_oracle("targets", "--check", f"{tmp_path / 'kernel.py'}:attention")
    assert (code, "does not conform" in printed) == (0, False)
    code, printed = attn_oracle("targets", "--check", f"{tmp_path / 'kernel.py'}:short")
    assert code == 1
    assert printed.count("does not conform") == 3
    assert "out has shape [1, 1, 2, 15], expected [1, 1, 2, 16]" in printed
