"""Latent attention at DeepSeek-V2's and V3's dimensions: prefill, and decoding from the latent cache, in both forms.

All heads are computed, the oracle looks at a sample: some heads of the core, some rows and columns of the whole layer
(its output's columns are rows of W_O, of which the rest is left out). Every test also keeps to a time and a memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from oracle.bounds.blocks import mla as block_bounds
from oracle.bounds.mla import output as core_bounds
from oracle.case import Case
from oracle.evaluate import enclose
from oracle.formats import FORMATS
from oracle.ops.contracts import declared_forms
from oracle.ops.mla.formula import DEEPSEEK_V2, DEEPSEEK_V3, Dimensions
from targets.builtin.mla_block import Settings, Weights, decode
from targets.builtin.mla_torch import mla_absorbed, mla_materialised

pytestmark = pytest.mark.deep

LOG = logging.getLogger(__name__)
Array = NDArray[Any]
MODELS = {"V2": DEEPSEEK_V2, "V3": DEEPSEEK_V3}
CORES = {"materialised": mla_materialised, "absorbed": mla_absorbed}
MOST_MEMORY, MOST_SECONDS = 8 * 2**30, 600.0
COLUMNS = 48
"""How many of the output's columns are computed."""
YARN = {
    "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
STATUS, REFERENCES = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@contextmanager
def within_limits() -> Iterator[None]:
    """Fails where the test takes more memory, from its start on, or time than it may; logs what it took."""
    if REFERENCES.exists():
        REFERENCES.write_text("5")  # the peak of resident memory starts anew
    start = time.monotonic()
    yield
    seconds, peak = time.monotonic() - start, 0
    if REFERENCES.exists():
        peak = next(int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith("VmHWM")) * 1024
    LOG.info("%.1f s, %.2f GiB", seconds, peak / 2**30)
    assert seconds < MOST_SECONDS
    assert peak < MOST_MEMORY


def drawn(shapes: Mapping[str, tuple[int, ...]], dtype: str, seed: int) -> dict[str, Array]:
    """Normal numbers, weights so that outputs are as large as inputs."""
    rng, fmt = np.random.default_rng(seed), FORMATS[dtype]
    made = {}
    for name, shape in shapes.items():
        gain = shape[-1] ** -0.5 if name.startswith("w_") else 1.0
        made[name] = fmt.store(rng.standard_normal(shape) * gain)
    return made


def tensors(arrays: Mapping[str, Array]) -> dict[str, torch.Tensor]:
    """The same numbers: NumPy's 16-bit formats by way of float32."""

    def tensor(a: Array) -> torch.Tensor:
        narrow = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(a.dtype.name)
        return torch.from_numpy(a) if narrow is None else torch.from_numpy(a.astype(np.float32)).to(narrow)

    return {name: tensor(a) for name, a in arrays.items()}


# --- the core ---------------------------------------------------------------------------------------------------------


def core_case(queries: int, keys: int, dtype: str) -> Case:
    d = DEEPSEEK_V3
    shapes = {
        "q_nope": (1, d.heads, queries, d.head), "q_pe": (1, d.heads, queries, d.rope), "c_kv": (1, keys, d.latent),
        "k_pe": (1, keys, d.rope), "w_uk": (d.heads, d.head, d.latent), "w_uv": (d.heads, d.value, d.latent),
    }  # fmt: skip
    return Case("mla", drawn(shapes, dtype, keys), {"is_causal": True, "causal_alignment": "bottom_right"})


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("queries", "keys"), [(512, 512), (2, 4096)], ids=["prefill", "decode"])
def test_the_core_keeps_its_contract(queries: int, keys: int, dtype: str) -> None:
    fmt = FORMATS[dtype]
    with within_limits():
        case = core_case(queries, keys, dtype)
        given = tensors(case.arrays)
        rows = np.unique(np.array([0, 1, queries // 2, queries - 2, queries - 1]))
        blocks = enclose(case, rows=rows, blocks=[(0, 0), (0, 77), (0, 127)])
        for form, core in CORES.items():
            y = core(**given, is_causal=True).double().numpy()
            forms = declared_forms("mla", core.__attn_oracle__["contract"], dtype)
            for block in blocks:
                part = block.part("out")
                promise = core_bounds.bounds(case, block, forms, {"out": fmt, "lse": FORMATS["fp32"]})[0]["out"]
                distance = part.distance(y[block.key][rows])
                LOG.info(
                    "%s %s: %.2g of %.2g, out %.2g",
                    form,
                    block.key,
                    (distance / promise.bound).max(),
                    promise.bound.max(),
                    part.upper_abs().max(),
                )
                assert (distance <= promise.bound).all()
                # Another head's output is no output of this one: the bound says something.
                other = y[0, (block.key[1] + 1) % DEEPSEEK_V3.heads][rows]
                assert (part.distance(other) > promise.bound).any()


# --- the whole layer --------------------------------------------------------------------------------------------------


def layer_case(d: Dimensions, length: int, dtype: str) -> Case:
    """Positions from 4000, so that most of them are beyond the length of the training."""
    shapes = {
        "x": (1, length, d.model), "w_dkv": (d.latent, d.model), "w_kr": (d.rope, d.model),
        "w_dq": (d.query_latent, d.model), "w_uk": (d.heads, d.head, d.latent), "w_uv": (d.heads, d.value, d.latent),
        "w_uq": (d.heads, d.head, d.query_latent), "w_qr": (d.heads, d.rope, d.query_latent),
        "w_o": (COLUMNS, d.heads * d.value),
    }  # fmt: skip
    arrays, fmt, rng = drawn(shapes, dtype, d.model), FORMATS[dtype], np.random.default_rng(9)
    gains = {"norm_kv": d.latent, "norm_q": d.query_latent}
    options: dict[str, Any] = {name: fmt.store(1 + 0.1 * rng.standard_normal(n)) for name, n in gains.items()}
    options |= {"layout": "interleaved", "scaling": YARN}
    return Case("mla_block", {**arrays, "positions": 4000 + np.arange(length, dtype=np.int64)}, options)


def run_layer(case: Case, form: str, cut: int, **changed: Any) -> Array:
    """Prefill of the rows before ``cut``, then every row alone from what is kept: y [length, columns]."""
    given = tensors(case.arrays)
    x, positions = given.pop("x"), given.pop("positions")
    options = {**case.options, **changed}
    norms = tensors({name: options[name] for name in ("norm_kv", "norm_q")})
    weights = Weights(**given, **norms)
    settings = Settings(10000.0, form=form, layout=options["layout"], scaling=options["scaling"])
    cache, parts = None, []
    for start, stop in [(0, cut), *((i, i + 1) for i in range(cut, x.shape[1]))]:
        part, cache = decode(x[:, start:stop], positions[start:stop], cache, weights, settings)
        parts.append(part)
    return np.asarray(torch.cat(parts, 1)[0].double().numpy())


@pytest.mark.parametrize("model", MODELS)
def test_the_layer_keeps_its_contract(model: str) -> None:
    """Prefill and decoding in float64, whose bound says something after four products of up to 16384 terms each.

    Passing is by the middle of enclosures that are themselves about 1e-4 wide, failing is certain.
    """
    length, cut = 512, 508
    with within_limits():
        case = layer_case(MODELS[model], length, "fp64")
        rows = np.array([0, 1, length // 2, cut - 1, cut, length - 1])
        block = enclose(case, rows=rows)[0]
        part = block.part("out")
        for form in CORES:
            forms = declared_forms("mla_block", {"preset": "fp64", "form": form}, "fp64")
            bound = block_bounds.bounds(case, block, forms, {"out": FORMATS["fp64"]})[0]["out"].bound
            distance = part.distance(run_layer(case, form, cut)[rows])
            LOG.info("%s: %.2g of %.2g, out %.2g", form, (distance / bound).max(), bound.max(), part.upper_abs().max())
            assert (distance <= bound).all()
            assert bound.max() < 0.05 * part.upper_abs().max()
        # What the last form's bound must not let pass, for certain.
        for changed in (
            {"scaling": {**YARN, "factor": 36.0}},
            {"scaling": {**YARN, "mscale_all_dim": None, "mscale": None, "attention_factor": 1.0}},
            {"layout": "half"},
            {"norm_q": np.ones_like(case.options["norm_q"])},
        ):
            wrong = run_layer(case, "materialised", length, **changed)[rows]
            assert (part.distance(wrong) > bound + part.rad).any(), changed


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_layer_in_narrow_formats(dtype: str) -> None:
    """Errors that all point one way are far larger than those of random signs: the bound holds and says nothing."""
    length, cut = 256, 254
    with within_limits():
        case = layer_case(DEEPSEEK_V3, length, dtype)
        rows = np.array([0, length // 2, length - 1])
        block = enclose(case, rows=rows)[0]
        part = block.part("out")
        for form in CORES:
            forms = declared_forms("mla_block", {"preset": "eager", "form": form}, dtype)
            bound = block_bounds.bounds(case, block, forms, {"out": FORMATS[dtype]})[0]["out"].bound
            distance = part.distance(run_layer(case, form, cut)[rows])
            LOG.info("%s: off by %.2g, bound %.2g", form, distance.max(), bound.max())
            assert (distance <= bound).all()
