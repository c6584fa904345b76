"""Cases: what is saved comes back to the last bit, and what is damaged is refused in one line."""

from __future__ import annotations

import hashlib
import json
import struct

import ml_dtypes
import numpy as np
import pytest

from oracle.case import Case, DamagedCase, load_case, save_case

BF16 = np.dtype(ml_dtypes.bfloat16)


def every_bf16():
    """All 2^16 patterns: signalling and quiet NaNs of every payload, infinities, both zeros, subnormals."""
    return np.arange(2**16, dtype=np.uint16).view(BF16).reshape(1, 4, 128, 128)


def full_case():
    rng = np.random.default_rng(1)
    return Case(
        "attention",
        {
            "q": every_bf16(),
            "k": rng.standard_normal((1, 2, 3, 4)).astype(np.float16),
            "v": np.array([[np.nan, -0.0, np.inf, 5e-324]]),
            "positions": np.array([0, 2**40, -1], dtype=np.int64),
        },
        {
            "scale": 0.1,
            "is_causal": True,
            "attn_mask": rng.random((1, 1, 3, 3)) < 0.5,
            "window_size": (-1, 3),
            "softcap": None,
            "layout": "half",
            "scaling": {"rope_type": "yarn", "factor": 0.1, "short": [1, 2.5]},
            "temperature": float("nan"),
            "limit": -np.inf,
        },
    )


def small_case():
    return Case("softmax", {"x": np.array([[1.0, -2.0]], dtype=np.float32)}, {"scale": 0.5})


def same(a: Case, b: Case) -> bool:
    def equal(x, y):
        if isinstance(x, np.ndarray):
            return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
        if isinstance(x, float):
            return type(y) is float and x.hex() == y.hex()
        return type(x) is type(y) and x == y

    return (
        a.op == b.op
        and a.arrays.keys() == b.arrays.keys()
        and a.options.keys() == b.options.keys()
        and all(equal(a.arrays[n], b.arrays[n]) for n in a.arrays)
        and all(equal(a.options[n], b.options[n]) for n in a.options)
    )


@pytest.mark.parametrize("which", [0, 1], ids=["safetensors", "json"])
def test_round_trip_is_exact(tmp_path, which):
    case = full_case()
    back = load_case(save_case(case, tmp_path / "deep" / "case", note={"from": "a test"})[which])
    assert same(case, back)
    assert case.digest() == back.digest()


def test_the_comparison_of_cases_can_fail():
    case = full_case()
    payload = case.arrays["q"].copy()
    payload.view(np.uint16).flat[0x7FC1] = 0x7FC2  # one NaN for another
    assert not same(case, case.with_arrays(q=payload))
    assert not same(case, case.with_options(scale=np.nextafter(0.1, 1)))
    assert not same(case, case.with_options(is_causal=1))


@pytest.mark.parametrize(
    "array",
    [
        np.array(1.5),
        np.array(3.0, dtype=BF16),
        np.zeros((0, 4), dtype=np.float16),
        np.zeros((2, 0), dtype=BF16),
    ],
    ids=["scalar", "bf16 scalar", "no rows", "no columns"],
)
def test_shapes_without_extent_come_back(tmp_path, array):
    case = Case("softmax", {"x": array}, {"attn_mask": array})
    assert same(case, load_case(save_case(case, tmp_path / "c")[0]))


def test_views_are_stored_as_what_they_show(tmp_path):
    base = np.arange(24, dtype=np.float32).astype(BF16).reshape(4, 6)
    views = {
        "t": base.T,
        "s": base[::2, ::-1],
        "b": np.broadcast_to(base[:1], (3, 6)),
        "f": np.asfortranarray(base),
    }
    copies = {n: np.array(v, order="C") for n, v in views.items()}
    case = Case("softmax", views, {"attn_mask": base.T})
    assert case.digest() == Case("softmax", copies, {"attn_mask": copies["t"]}).digest()
    back = load_case(save_case(case, tmp_path / "c")[0])
    assert all(np.array_equal(back.arrays[n].view(np.uint16), copies[n].view(np.uint16)) for n in copies)


def test_names_with_dots_stay_apart(tmp_path):
    a, b = small_case(), small_case().with_options(scale=0.25)
    first, second = save_case(a, tmp_path / "scale-0.5"), save_case(b, tmp_path / "scale-0.25")
    assert len({*first, *second}) == 4
    assert same(load_case(first[0]), a)
    assert same(load_case(second[1]), b)
    assert same(load_case(tmp_path / "scale-0.5"), a)


def test_numpy_scalars_are_plain_options(tmp_path):
    plain = small_case().with_options(scale=0.5, is_causal=True, window_size=3)
    numpy = small_case().with_options(scale=np.float32(0.5), is_causal=np.True_, window_size=np.int64(3))
    assert plain.digest() == numpy.digest()
    assert same(load_case(save_case(numpy, tmp_path / "c")[0]), plain)


def test_saving_leaves_no_other_file(tmp_path):
    files = save_case(small_case(), tmp_path / "c")
    assert sorted(tmp_path.iterdir()) == sorted(files)


# ---- digest


def test_digest_changes_with_every_bit_of_every_array():
    case = small_case().with_options(attn_mask=np.array([[0.5, 1.0]], dtype=np.float16))
    seen = {case.digest()}
    for where in ("x", "attn_mask"):
        held = case.arrays[where] if where == "x" else case.options[where]
        for bit in range(8 * held.nbytes):
            raw = bytearray(held.tobytes())
            raw[bit // 8] ^= 1 << bit % 8
            changed = np.frombuffer(bytes(raw), dtype=held.dtype).reshape(held.shape)
            seen.add((case.with_arrays(x=changed) if where == "x" else case.with_options(attn_mask=changed)).digest())
    assert len(seen) == 1 + 64 + 32


def test_digest_changes_with_op_shape_dtype_name_and_option():
    case = small_case().with_options(attn_mask=np.zeros((1, 2), dtype=np.float16))
    x = case.arrays["x"]
    others = [
        case,
        Case("log_softmax", case.arrays, case.options),
        case.with_arrays(x=x.reshape(2, 1)),
        case.with_arrays(x=x.view(np.int32)),
        Case(case.op, {"y": x}, case.options),
        case.with_arrays(y=x),
        case.with_options(scale=np.nextafter(0.5, 1)),
        case.with_options(scale=-0.5),
        case.with_options(scale=1),
        case.with_options(scale=1.0),
        case.with_options(scale=True),
        case.with_options(scale=0.0),
        case.with_options(scale=-0.0),
        case.without_options("scale"),
        case.with_options(is_causal=False),
        case.with_options(attn_mask=np.zeros((2, 1), dtype=np.float16)),
        case.with_options(attn_mask=np.zeros((1, 2), dtype=BF16)),
    ]
    assert len({c.digest() for c in others}) == len(others)


def test_digest_ignores_order_of_names():
    a, b = np.zeros(2), np.ones(2)
    first, second = (
        Case("x", {"a": a, "b": b}, {"m": 1, "n": 2}),
        Case("x", {"b": b, "a": a}, {"n": 2, "m": 1}),
    )
    assert first.digest() == second.digest()


def test_the_digest_is_the_documented_hash():
    # Stored cases and records carry digests: a change of the scheme must be seen.
    text = b'["softmax", {"scale": {"hex": "0x1.0000000000000p-1"}}]' + b"xfloat32(1, 2)"
    assert small_case().digest() == hashlib.sha256(text + struct.pack("<2f", 1.0, -2.0)).hexdigest()[:16]


def test_changing_a_case_makes_a_new_one():
    case = full_case()
    before = case.digest()
    changed = case.with_arrays(q=case.arrays["q"][:, :1]).with_options(scale=2.0).without_options("is_causal", "absent")
    assert case.digest() == before != changed.digest()
    assert changed.options["scale"] == 2.0
    assert "is_causal" not in changed.options
    with pytest.raises(AttributeError):
        case.op = "rope"


def test_describe_is_one_line_without_contents():
    text = full_case().describe()
    assert "\n" not in text
    assert "q[1, 4, 128, 128] bfloat16" in text
    assert "attn_mask=array[1, 1, 3, 3] bool" in text
    assert "scale=0.1" in text
    assert len(text) < 600


# ---- damage


def refuse(path) -> str:
    with pytest.raises(DamagedCase) as caught:
        load_case(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    assert isinstance(caught.value, ValueError)
    return message


def flipped(content: bytes, bit: int) -> bytes:
    raw = bytearray(content)
    raw[bit // 8] ^= 1 << bit % 8
    return bytes(raw)


def read(path) -> Case | None:
    try:
        return load_case(path)
    except DamagedCase:
        return None


def test_every_flipped_bit_is_refused_or_harmless(tmp_path):
    # The header of safetensors has bits that mean nothing (padding); all others must be noticed.
    case = small_case()
    data, meta = save_case(case, tmp_path / "c")
    content = data.read_bytes()
    bits, arrays = 8 * len(content), 8 * case.arrays["x"].nbytes
    refused = 0
    for bit in range(bits):
        data.write_bytes(flipped(content, bit))
        back = read(data)
        assert back is None or same(back, case), f"bit {bit}"
        refused += back is None
    assert refused > 0.9 * bits
    for bit in range(bits - arrays, bits):
        data.write_bytes(flipped(content, bit))
        assert "digest" in refuse(meta)


def test_every_truncation_is_refused(tmp_path):
    data, meta = save_case(small_case(), tmp_path / "c")
    for path in (data, meta):
        content = path.read_bytes()
        for length in range(len(content) - 1):
            path.write_bytes(content[:length])
            refuse(path)
        path.write_bytes(content)
    load_case(data)


def test_missing_files_are_refused(tmp_path):
    refuse(tmp_path / "nothing.json")
    for gone in (0, 1):
        files = save_case(small_case(), tmp_path / f"c{gone}")
        files[gone].unlink()
        assert "FileNotFoundError" in refuse(files[1 - gone])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "3",
        '"case"',
        "{}",
        '{"op": "softmax"}',
        "[" * 100_000,
        "\x00",
        '{"dtypes": 3}',
        "not\njson",
    ],
)
def test_other_json_is_refused(tmp_path, text):
    data, meta = save_case(small_case(), tmp_path / "c")
    meta.write_text(text)
    refuse(data)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("op", "log_softmax"),
        ("op", ["softmax"]),
        ("options", {"scale": {"hex": "0x1.8p-1"}}),
        ("options", {"scale": {"hex": "half"}}),
        ("options", {"scale": {"hex": None}}),
        ("options", {"scale": {"hex": "0x1p9999"}}),
        ("options", {"attn_mask": {"array": "bool", "sha": "0"}}),
        ("options", None),
        ("options", [1, 2]),
        ("dtypes", {}),
        ("dtypes", {"arrays/x": "bfloat16"}),
        ("dtypes", None),
        ("digest", None),
        ("digest", "0" * 16),
    ],
)
def test_an_edited_document_is_refused(tmp_path, key, value):
    data, meta = save_case(small_case(), tmp_path / "c")
    document = json.loads(meta.read_text())
    meta.write_text(json.dumps({**document, key: value}))
    refuse(data)
    del document[key]
    meta.write_text(json.dumps(document))
    refuse(data)


def test_arrays_of_another_case_are_refused(tmp_path):
    a, b = save_case(small_case(), tmp_path / "a"), save_case(full_case(), tmp_path / "b")
    a[0].write_bytes(b[0].read_bytes())
    refuse(a[0])


def test_a_name_with_a_line_break_still_gives_one_line(tmp_path):
    with pytest.raises(DamagedCase) as caught:
        load_case(tmp_path / "no\nsuch.json")
    assert "\n" not in str(caught.value)


def test_a_directory_or_bytes_that_are_no_text_are_refused(tmp_path):
    data, meta = save_case(small_case(), tmp_path / "c")
    meta.write_bytes(b"\xff\xfe\x00")
    refuse(data)
    meta.unlink()
    meta.mkdir()
    refuse(data)
