"""Record real attention inputs: `python -m properties.data.capture [--text FILE] [--tokens N] [--layers A B C]`.

Runs the packaged model over the beginning of a text of this project, checks in float64 that what was recorded
is what attention read and that attention of it is what the model computed, and only then writes
`properties/data/smollm2/`: one safetensors file a layer (q_pre, k_pre, q, k, v), the text, and `provenance.json`. The
same text on the same machine gives the same bytes, and a run that changes nothing leaves the stored files,
and their date, alone.
"""

import argparse
import datetime
import hashlib
import importlib.metadata
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from oracle.formats import StoredArray
from properties.data import checks
from properties.data.record import (
    FILE,
    PACKAGE,
    CaptureError,
    Reading,
    Recording,
    leading_tokens,
    load,
    model_file,
    probe,
    record,
)

SCHEMA = 1
OUT = Path(__file__).parent / "smollm2"
# The extremes of the survey in provenance.json: most diffuse, least sink, one head with all its mass on the
# sink.
LAYERS = (0, 11, 18)


def main(arguments: list[str] | None = None) -> int:
    """0 when the files are written or unchanged, 1 with one line on stderr when a check fails."""
    options = _parse(arguments)
    try:
        sys.stdout.write(_capture(options.text, options.tokens, tuple(options.layers)) + "\n")
    except (CaptureError, OSError) as error:
        sys.stderr.write(f"capture: {error}\n")
        return 1
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m properties.data.capture", description="record real attention inputs"
    )
    parser.add_argument("--text", default="README.md", help="the text to run the model over (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="how many of its first tokens (default: %(default)s)")
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS, help="layers to store (default: %(default)s)")
    return parser.parse_args(arguments)


def _capture(source: str, tokens: int, layers: tuple[int, ...]) -> str:
    text = Path(source).read_text(encoding="utf-8")
    path = model_file()
    tokenizer, model = load(path)
    probe_loss = probe(tokenizer, model)
    excerpt, ids = leading_tokens(tokenizer, text, tokens)
    recording = record(model, ids)
    if not set(layers) <= set(range(len(recording.readings))):
        raise CaptureError(f"layers {layers} asked for; the model has 0..{len(recording.readings) - 1}")
    survey = [_survey(index, reading) for index, reading in enumerate(recording.readings)]
    files = {f"layer{i:02d}": save(_tensors(recording.readings[i])) for i in layers}
    provenance: dict[str, object] = {
        "schema": SCHEMA,
        "model": {
            "name": "SmolLM2-135M-Instruct",
            "author": "HuggingFaceTB",
            "license": "Apache-2.0",
            "package": PACKAGE,
            "package_version": importlib.metadata.version(PACKAGE),
            "file": FILE,
            "sha256": _sha256(path.read_bytes()),
            "probe_loss_nats_per_token": probe_loss,
        },
        "run": {
            "command": _command(source, tokens, layers),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "dtype": "fp32",
            "threads": 1,
            **_versions(),
        },
        "text": {
            "source": source,
            "file": "text.txt",
            "sha256": _sha256(excerpt.encode()),
            "tokens": len(ids),
            "loss_nats_per_token": recording.loss,
        },
        "rope": {"base": recording.rope_base, "layout": "half", "positions": [0, len(ids) - 1]},
        "survey": survey,
        "layers": {
            name: {"file": f"{name}.safetensors", "sha256": _sha256(content), **_describe(recording, layer)}
            for (name, content), layer in zip(files.items(), layers, strict=True)
        },
    }
    contents = {f"{name}.safetensors": content for name, content in files.items()}
    return _store(provenance, contents | {"text.txt": excerpt.encode()})


def _tensors(reading: Reading) -> dict[str, StoredArray]:
    return {name: getattr(reading, name) for name in ("q_pre", "k_pre", "q", "k", "v")}


def _describe(recording: Recording, layer: int) -> dict[str, object]:
    """The facts of one stored layer; CaptureError where float32 rounding does not explain a residual."""
    r = recording.readings[layer]
    residuals = {
        "rope_q": checks.rope_residual(r.q_pre, r.q, recording.rope_base),
        "rope_k": checks.rope_residual(r.k_pre, r.k, recording.rope_base),
        "attention": checks.attention_residual(r.q, r.k, r.v, r.output),
    }
    for name, residual in residuals.items():
        if not residual.share_of_bound <= 1:  # written so that NaN is refused too
            raise CaptureError(
                f"layer {layer}: {name} differs by {residual.max_abs:.3g}, {residual.share_of_bound:.3g} of its bound"
            )
    _, weights, _ = checks.attention(*(x.astype(np.float64) for x in (r.q, r.k, r.v)))
    return {
        "layer": layer,
        "query_heads": r.q.shape[0],
        "kv_heads": r.k.shape[0],
        "head_dim": r.q.shape[2],
        "sink_mass": checks.sink_mass(weights),
        "residuals": {name: asdict(residual) for name, residual in residuals.items()},
    }


def _survey(layer: int, r: Reading) -> dict[str, float]:
    """What a layer's attention is like, in seven numbers: the reason for the choice of layers."""
    q, k, v = (x.astype(np.float64) for x in (r.q, r.k, r.v))
    _, weights, scores = checks.attention(q, k, v)
    sinks = checks.sink_mass(weights)
    row = {
        "sink_mass_mean": float(np.mean(sinks)),
        "sink_mass_max": max(sinks),
        "entropy_nats": checks.entropy(weights),
        "score_range": checks.score_range(scores),
        "q_std": float(q.std()),
        "k_std": float(k.std()),
        "v_std": float(v.std()),
    }
    return {"layer": layer} | {name: float(f"{value:.6g}") for name, value in row.items()}


def _versions() -> dict[str, str]:
    import torch

    names = ("torch", "transformers", "gguf", "numpy", "safetensors")
    versions = {name: importlib.metadata.version(name) for name in names}
    # Matrix products take another summation order on another instruction set: then bytes may differ,
    # residuals may not.
    return versions | {"instruction_set": torch.backends.cpu.get_cpu_capability()}


def _command(source: str, tokens: int, layers: tuple[int, ...]) -> str:
    return shlex.join(
        [
            "python",
            "-m",
            "properties.data.capture",
            "--text",
            source,
            "--tokens",
            str(tokens),
            "--layers",
            *map(str, layers),
        ]
    )


def _store(provenance: dict[str, Any], contents: dict[str, bytes]) -> str:
    """Write provenance and files, unless only the date would change; what was done, in one line."""
    path = OUT / "provenance.json"
    date = _recorded_date(path)
    if date is not None and all((OUT / f).is_file() and (OUT / f).read_bytes() == c for f, c in contents.items()):
        same = provenance | {"run": provenance["run"] | {"date": date}}
        if path.read_text(encoding="utf-8") == _json(same):
            return f"{OUT}: unchanged, same bytes as recorded on {date}"
    OUT.mkdir(exist_ok=True)
    for stale in OUT.glob("layer*.safetensors"):
        stale.unlink()
    for name, content in contents.items():
        (OUT / name).write_bytes(content)
    path.write_text(_json(provenance), encoding="utf-8")
    size = sum(map(len, contents.values())) / 2**20
    return f"{OUT}: {', '.join(contents)}, provenance.json written, {size:.2f} MiB"


def _recorded_date(path: Path) -> str | None:
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["run"]["date"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # nothing stored, or nothing readable: either way it is written anew


def _json(provenance: dict[str, object]) -> str:
    return json.dumps(provenance, indent=1) + "\n"


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
