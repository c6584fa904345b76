"""The stored activations are what their provenance says, computed without the formulas that recorded them."""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from properties.data import capture, checks
from properties.data.record import PROBE_LIMIT, CaptureError, Reading, Recording, leading_tokens, probe
from properties.inputs.real_input import STORE, CapturedLayer, DamagedCaptureError, captured_layers, load_layer

PROVENANCE = json.loads((STORE / "provenance.json").read_text(encoding="utf-8"))


@pytest.fixture(params=captured_layers())
def layer(request: pytest.FixtureRequest) -> CapturedLayer:
    return load_layer(request.param)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(STORE, tmp_path / "smollm2"))


def rows(layer: CapturedLayer, head: int) -> list[np.ndarray[Any, Any]]:
    """Softmax weights of one query head, row by row over the allowed keys only, in extended precision."""
    q = layer.q[head].astype(np.longdouble)
    k = layer.k[head // 3].astype(np.longdouble)
    weights = []
    for i in range(len(q)):
        exponentials = np.exp(k[: i + 1] @ q[i] / np.longdouble(8))
        weights.append(exponentials / exponentials.sum())
    return weights


def rotated(x: np.ndarray[Any, Any], base: float) -> np.ndarray[Any, Any]:
    """RoPE by complex multiplication with powers of exp(i theta)."""
    pairs = x[..., :32].astype(np.float64) + 1j * x[..., 32:]
    turns = np.exp(1j * np.arange(x.shape[1])[:, None] * base ** (-np.arange(0, 64, 2) / 64))
    turned = pairs * turns
    return np.concatenate([turned.real, turned.imag], axis=-1)


# --- the stored files ---


def test_the_layers_are_a_llama_models_and_fit_together(layer: CapturedLayer) -> None:
    length = PROVENANCE["text"]["tokens"]
    assert layer.q_pre.shape == layer.q.shape == (9, length, 64)
    assert layer.k_pre.shape == layer.k.shape == layer.v.shape == (3, length, 64)
    assert layer.name == f"layer{layer.layer:02d}"
    assert len(layer.sink_mass) == 9
    for name in ("q_pre", "k_pre", "q", "k", "v"):
        assert getattr(layer, name).dtype == np.float32
        with pytest.raises(ValueError, match="read-only"):
            getattr(layer, name)[0, 0, 0] = 0


def test_the_whole_store_stays_small() -> None:
    assert len(captured_layers()) == 3
    assert sum(path.stat().st_size for path in STORE.iterdir()) < 6 * 2**20


def test_sink_mass_is_the_mean_weight_on_token_0(layer: CapturedLayer) -> None:
    for head, stored in enumerate(layer.sink_mass):
        recomputed = np.mean([row[0] for row in rows(layer, head)[1:]])
        assert stored == pytest.approx(float(recomputed), rel=1e-9)


def test_q_and_k_are_the_rotation_of_q_pre_and_k_pre(layer: CapturedLayer) -> None:
    for name, before, after in (("rope_q", layer.q_pre, layer.q), ("rope_k", layer.k_pre, layer.k)):
        difference = np.abs(after - rotated(before, layer.rope_base)).max()
        stored = PROVENANCE["layers"][layer.name]["residuals"][name]
        assert stored["max_abs"] == pytest.approx(float(difference), rel=1e-3)
        assert 0 < stored["share_of_bound"] <= 1


def test_position_0_is_not_turned_and_the_others_are(layer: CapturedLayer) -> None:
    np.testing.assert_array_equal(layer.q[:, 0], layer.q_pre[:, 0])
    assert (np.abs(layer.q - layer.q_pre).max(axis=(0, 2))[1:] > 0.1).all()


def test_the_layers_are_the_extremes_that_the_readme_names() -> None:
    survey = PROVENANCE["survey"]
    assert [row["layer"] for row in survey] == list(range(30))
    diffuse = max(survey, key=lambda row: row["entropy_nats"])
    no_sink = min(survey, key=lambda row: row["sink_mass_mean"])
    sink = max(survey, key=lambda row: row["sink_mass_max"])
    assert [load_layer(name).layer for name in captured_layers()] == [row["layer"] for row in (diffuse, no_sink, sink)]
    assert sink["score_range"] == max(row["score_range"] for row in survey)
    assert no_sink["k_std"] == max(row["k_std"] for row in survey)
    assert max(load_layer(captured_layers()[-1]).sink_mass) > 0.99


def test_the_survey_of_a_stored_layer_is_recomputed(layer: CapturedLayer) -> None:
    row = PROVENANCE["survey"][layer.layer]
    length = layer.q.shape[1]
    weights = [rows(layer, head) for head in range(9)]
    entropies = [-float((p * np.log(p)).sum()) for head in weights for p in head[length // 2 :]]
    ranges = [float(np.log(p.max() / p.min())) for head in weights for p in head]
    assert row["entropy_nats"] == pytest.approx(np.mean(entropies), rel=1e-5)
    assert row["score_range"] == pytest.approx(max(ranges), rel=1e-5)
    assert row["sink_mass_mean"] == pytest.approx(np.mean(layer.sink_mass), rel=1e-5)
    assert row["sink_mass_max"] == pytest.approx(max(layer.sink_mass), rel=1e-5)
    for name in ("q", "k", "v"):
        assert row[f"{name}_std"] == pytest.approx(np.std(getattr(layer, name).astype(np.float64)), rel=1e-5)


def test_the_model_reproduced_its_own_attention() -> None:
    for facts in PROVENANCE["layers"].values():
        residual = facts["residuals"]["attention"]
        assert 0 < residual["share_of_bound"] <= 1
        assert residual["max_abs"] < 1e-4


def test_the_model_was_loaded_rightly() -> None:
    assert PROVENANCE["model"]["probe_loss_nats_per_token"] < PROBE_LIMIT
    assert PROVENANCE["text"]["loss_nats_per_token"] < np.log(49152)  # a uniform guess over the vocabulary


def test_the_stored_text_is_the_recorded_one() -> None:
    text = (STORE / PROVENANCE["text"]["file"]).read_bytes()
    assert hashlib.sha256(text).hexdigest() == PROVENANCE["text"]["sha256"]


def test_the_licence_is_recorded_and_named_in_the_readme() -> None:
    readme = (STORE.parent / "README.md").read_text(encoding="utf-8")
    model = PROVENANCE["model"]
    assert model["license"] == "Apache-2.0"
    assert model["name"] in readme
    assert f"`{model['package']}` {model['package_version']}" in readme


# --- the loader on damaged files ---


def flip_a_byte(store: Path) -> None:
    path = store / "layer11.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def not_a_tensor_file(store: Path) -> None:
    (store / "layer11.safetensors").write_bytes(b"x")
    edit(store, lambda p: p["layers"]["layer11"].update(sha256=hashlib.sha256(b"x").hexdigest()))


def replace_tensors(store: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    """A consistent hash over the wrong content: only the checks of content can notice."""
    content = save(tensors)
    (store / "layer11.safetensors").write_bytes(content)
    edit(store, lambda p: p["layers"]["layer11"].update(sha256=hashlib.sha256(content).hexdigest()))


def edit(store: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = store / "provenance.json"
    provenance = json.loads(path.read_text(encoding="utf-8"))
    change(provenance)
    path.write_text(json.dumps(provenance), encoding="utf-8")


def stored_tensors(**changes: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    layer = load_layer("layer11")
    return {name: getattr(layer, name) for name in ("q_pre", "k_pre", "q", "k", "v")} | changes


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped bit": (flip_a_byte, r"layer11\.safetensors: sha256"),
    "missing layer": (
        lambda s: (s / "layer11.safetensors").unlink(),
        r"layer11\.safetensors: No such file.*tox -e capture",
    ),
    "missing provenance": (lambda s: (s / "provenance.json").unlink(), r"provenance\.json: No such file"),
    "truncated provenance": (lambda s: (s / "provenance.json").write_text('{"schema": 1'), "not JSON"),
    "other schema": (lambda s: edit(s, lambda p: p.update(schema=2)), "schema 1 expected"),
    "no layers": (lambda s: edit(s, lambda p: p.pop("layers")), "no layers"),
    "no sink mass": (
        lambda s: edit(s, lambda p: p["layers"]["layer11"].pop("sink_mass")),
        "layer11 lacks 'sink_mass'",
    ),
    "not a tensor file": (not_a_tensor_file, "not safetensors"),
    "NaN": (
        lambda s: replace_tensors(s, stored_tensors(v=np.full_like(load_layer("layer11").v, np.nan))),
        "v is float32, finite float32 expected",
    ),
    "float64": (
        lambda s: replace_tensors(s, stored_tensors(v=load_layer("layer11").v.astype(np.float64))),
        "v is float64",
    ),
    "swapped heads": (lambda s: replace_tensors(s, stored_tensors(q=load_layer("layer11").k)), "expected"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_one_clear_line(copy: Path, damage: str) -> None:
    assert load_layer("layer11", store=copy).name == "layer11"
    harm, message = DAMAGE[damage]
    harm(copy)
    with pytest.raises(DamagedCaptureError, match=message) as caught:
        load_layer("layer11", store=copy)
    assert "\n" not in str(caught.value)


def test_an_unknown_layer_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no captured layer 'layer05'; there are: layer00, layer11, layer18"):
        load_layer("layer05")


# --- the checks of the recording program can fail ---


def interleaved(x: np.ndarray[Any, Any], base: float) -> np.ndarray[Any, Any]:
    order = np.concatenate([np.arange(0, 64, 2), np.arange(1, 64, 2)])
    turned = np.empty(x.shape)
    turned[..., order] = rotated(x[..., order], base)
    return turned


def test_the_rope_check_accepts_the_record_and_refuses_other_rotations() -> None:
    layer = load_layer("layer11")
    assert checks.rope_residual(layer.k_pre, layer.k, 1e5).share_of_bound < 1
    assert checks.rope_residual(layer.k_pre, layer.k, 1.001e5).share_of_bound > 1
    assert checks.rope_residual(layer.k_pre, layer.k_pre, 1e5).share_of_bound > 1
    assert checks.rope_residual(layer.k_pre, interleaved(layer.k_pre, 1e5).astype(np.float32), 1e5).share_of_bound > 1
    shifted = np.roll(layer.k, 1, axis=1)
    assert checks.rope_residual(np.roll(layer.k_pre, 1, axis=1), shifted, 1e5).share_of_bound > 1


def test_where_nothing_can_be_rounded_only_equality_is_accepted() -> None:
    zero = np.zeros((1, 2, 4), np.float32)
    assert checks.rope_residual(zero, zero, 1e5) == checks.Residual(max_abs=0.0, share_of_bound=0.0)
    assert checks.rope_residual(zero, zero + np.float32(1e-30), 1e5).share_of_bound == np.inf


def float32_attention(layer: CapturedLayer) -> np.ndarray[Any, Any]:
    """The definition evaluated in float32, row by row: what an honest model would have returned."""
    out = np.empty_like(layer.q)
    for head in range(9):
        k, v = layer.k[head // 3], layer.v[head // 3]
        for i in range(out.shape[1]):
            scores = k[: i + 1] @ layer.q[head, i] * np.float32(0.125)
            exponentials = np.exp(scores - scores.max())
            out[head, i] = exponentials / exponentials.sum() @ v[: i + 1]
    return out


def test_the_attention_check_accepts_an_honest_float32_result_and_refuses_others(
    layer: CapturedLayer,
) -> None:
    honest = float32_attention(layer)
    assert honest.dtype == np.float32
    assert checks.attention_residual(layer.q, layer.k, layer.v, honest).share_of_bound < 1
    half = honest.astype(np.float16).astype(np.float32)
    assert checks.attention_residual(layer.q, layer.k, layer.v, half).share_of_bound > 1
    other_heads = np.ascontiguousarray(layer.k[::-1])
    assert checks.attention_residual(layer.q, other_heads, layer.v, honest).share_of_bound > 1
    assert checks.attention_residual(layer.q_pre, layer.k_pre, layer.v, honest).share_of_bound > 1


def recording(layer: CapturedLayer, **changes: np.ndarray[Any, Any]) -> Recording:
    arrays = {name: getattr(layer, name) for name in ("q_pre", "k_pre", "q", "k", "v")}
    reading = Reading(**arrays, output=float32_attention(layer))
    return Recording(readings=(dataclasses.replace(reading, **changes),), loss=3.0, rope_base=layer.rope_base)


def test_a_recording_that_fails_a_check_is_refused() -> None:
    layer = load_layer("layer18")
    facts = capture._describe(recording(layer), 0)
    assert facts["sink_mass"] == pytest.approx(layer.sink_mass, rel=1e-12)
    with pytest.raises(CaptureError, match="layer 0: rope_q differs by"):
        capture._describe(recording(layer, q_pre=layer.q), 0)
    with pytest.raises(CaptureError, match="layer 0: attention differs by"):
        capture._describe(recording(layer, v=layer.v[::-1]), 0)


@pytest.mark.parametrize("loss", [PROBE_LIMIT, 2.97, float("nan")])
def test_a_wrongly_loaded_model_is_refused(loss: float) -> None:
    def tokenizer(text: str, **_: str) -> dict[str, str]:
        return {"input_ids": text}

    def model(_text: str, *, labels: str) -> SimpleNamespace:
        assert labels.startswith("Monday")
        return SimpleNamespace(loss=loss)

    with pytest.raises(CaptureError, match="loaded wrongly"):
        probe(tokenizer, model)
    assert probe(tokenizer, lambda _text, **_: SimpleNamespace(loss=0.97)) == 0.97


class Words:
    """A tokenizer whose tokens depend on what follows: "sixsix" is two tokens, a cut "si" one a letter."""

    def __call__(self, text: str, **_: bool) -> dict[str, Any]:
        ids: list[int] = []
        offsets = []
        for start, word in enumerate(text.split(" ")):
            pieces = [word] if len(word) in (0, 4) else [word[:2], word[2:]] if len(word) == 6 else list(word)
            position = sum(len(w) + 1 for w in text.split(" ")[:start])
            for piece in pieces:
                ids.append(sum(map(ord, piece)))
                offsets.append((position, position + len(piece)))
                position += len(piece)
        return {"input_ids": ids, "offset_mapping": offsets}


def test_the_excerpt_gives_its_own_tokens() -> None:
    assert leading_tokens(Words(), "four four four", 2) == ("four four", [sum(map(ord, "four"))] * 2)
    # Token 2 ends inside "sixsix", and "si" alone would be two tokens: one token fewer is taken.
    excerpt, ids = leading_tokens(Words(), "four sixsix four", 2)
    assert (excerpt, len(ids)) == ("four", 1)
    with pytest.raises(CaptureError, match="the text has 3 tokens, 4 are needed"):
        leading_tokens(Words(), "four four four", 4)


def test_a_second_run_with_the_same_result_keeps_the_recorded_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "OUT", tmp_path / "store")

    def provenance(date: str, loss: float) -> dict[str, Any]:
        return {"run": {"date": date}, "loss": loss}

    assert "written" in capture._store(provenance("2001-01-01", 1.0), {"layer00.safetensors": b"a"})
    assert "unchanged" in capture._store(provenance("2002-02-02", 1.0), {"layer00.safetensors": b"a"})
    assert json.loads((tmp_path / "store" / "provenance.json").read_text()) == provenance("2001-01-01", 1.0)
    assert "written" in capture._store(provenance("2003-03-03", 1.5), {"layer00.safetensors": b"a"})
    assert "written" in capture._store(provenance("2004-04-04", 1.5), {"layer01.safetensors": b"a"})
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == [
        "layer01.safetensors",
        "provenance.json",
    ]


def test_the_command_ends_with_one_line_where_there_is_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert capture.main(["--text", "no/such/file.md"]) == 1
    assert capsys.readouterr().err == "capture: [Errno 2] No such file or directory: 'no/such/file.md'\n"
