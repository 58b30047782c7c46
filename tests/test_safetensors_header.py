"""Safetensors headers as an attacker or a broken download would leave them: a valid table or a one-line CheckpointError, cheaply."""

import json
import string
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from effllm.offload.checkpoint import CheckpointError, TensorStore
from effllm.offload.safetensors_header import MAX_HEADER

FUZZ = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
GOOD = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}


def write(folder: Path, header: Any, data: int = 32, length: int | None = None) -> Path:
    """A file with this header (an object or raw bytes), `data` bytes after it, and any claimed header length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data))
    return folder


def changed(name: str, **fields: Any) -> dict[str, Any]:
    return {**GOOD, name: {**GOOD[name], **fields}}


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        TensorStore.open(folder)
    assert caught.value.exit_code == 1
    assert caught.value.hint
    assert len(caught.value.message.splitlines()) == 1
    assert len(caught.value.message) < 400 + len(str(folder))
    return caught.value.message.removeprefix(str(folder))


def test_the_unchanged_header_opens(tmp_path: Path) -> None:
    with TensorStore.open(write(tmp_path, GOOD)) as store:
        a, b = store.tensors["a"], store.tensors["b"]
        begin = (tmp_path / "model.safetensors").stat().st_size - 32
        assert (a.dtype, a.shape, a.offset, a.nbytes) == ("F32", (2, 3), begin, 24)
        assert (b.dtype, b.shape, b.offset, b.nbytes) == ("BF16", (4,), begin + 24, 8)
        assert store.nbytes == 32


@pytest.mark.parametrize("size", range(8))
def test_shorter_than_the_length_field(tmp_path: Path, size: int) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(size))
    assert "is cut short" in refusal(tmp_path)


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 2**40, MAX_HEADER + 1])
def test_oversized_header(tmp_path: Path, length: int) -> None:
    assert f"claims a header of {length} bytes" in refusal(write(tmp_path, GOOD, length=length))


def test_header_longer_than_the_file(tmp_path: Path) -> None:
    text = json.dumps(GOOD).encode()
    assert "is cut short" in refusal(write(tmp_path, text[:40], data=0, length=len(text)))


@pytest.mark.parametrize("cut", [1, 8, 31, 32])
def test_cut_data(tmp_path: Path, cut: int) -> None:
    """What an interrupted download leaves: a whole header, not all of the bytes."""
    assert "holds" in refusal(write(tmp_path, GOOD, data=32 - cut))


def test_git_lfs_pointer(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1234\n")
    assert "Git LFS pointer" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (changed("b", data_offsets=[24, 33]), "at bytes 24:33, but holds 32"),
        (changed("b", data_offsets=[2**62, 2**62 + 8]), "at bytes"),
        (changed("b", data_offsets=[32, 24]), "at bytes 32:24"),
        (changed("b", data_offsets=[20, 28]), "'a' and 'b' that overlap"),
        (changed("b", data_offsets=[0, 8]), "overlap"),
        (changed("b", shape=[3], data_offsets=[26, 32]), "2 bytes between tensors 'a' and 'b'"),
        (changed("a", shape=[5], data_offsets=[4, 24]), "4 bytes before its first tensor 'a'"),
        (changed("b", shape=[2], data_offsets=[24, 28]), "4 bytes that belong to no tensor"),
        ({}, "32 bytes that belong to no tensor"),
        (changed("a", shape=[2, 4]), "24 bytes do not match F32 [2, 4]"),
        (changed("a", shape=[2**62, 2**62, 2**62]), "do not match"),
        (changed("a", shape=[True, 6]), "impossible shape [True, 6]"),
        (changed("a", shape=[-2, -3]), "impossible shape [-2, -3]"),
        (changed("a", shape=[2.0, 3]), "impossible shape [2.0, 3]"),
        (changed("a", shape=[10**400]), "impossible shape"),
        (changed("a", shape=[1] * 65), "impossible shape"),
        (changed("a", shape="23"), "impossible shape '23'"),
        (changed("a", shape=None), "impossible shape None"),
        (changed("a", data_offsets=[False, 24]), "impossible offsets [False, 24]"),
        (changed("a", data_offsets=[0, 24, 48]), "impossible offsets"),
        (changed("a", data_offsets=[-1, 23]), "impossible offsets"),
        (changed("a", data_offsets={"0": 24}), "impossible offsets {...}"),
        (changed("a", dtype="F33"), "unknown dtype 'F33'"),
        (changed("a", dtype=["F32"]), "unknown dtype ['F32']".replace("'F32'", "...")),
        (changed("a", extra=1), "other fields than dtype, shape and data_offsets"),
        ({**GOOD, "a": {"dtype": "F32"}}, "other fields than dtype, shape and data_offsets"),
        ({**GOOD, "a": None}, "other fields than dtype, shape and data_offsets"),
        ({**GOOD, "__metadata__": {"format": 1}}, "metadata"),
        ({**GOOD, "__metadata__": "pt"}, "metadata"),
        ({**GOOD, "x" * 10_000 + "\n\x1b[2J": None}, "..."),
        ([GOOD], "not a JSON object"),
        (b"", "damaged header"),
        (b"{", "damaged header"),
        (b"\xff\xfe{}", "damaged header"),
        (b'{"a":1,"a":2}', "a key is repeated"),
        (b'{"\\ud800":1}', "surrogates"),
        (b'{"a":NaN}', "NaN is not JSON"),
        (b"[" * 100_000, "damaged header"),
        (b'{"a":' * 100_000, "damaged header"),
        (b'{"a":' + b"9" * 10_000 + b"}", "damaged header"),
    ],
    ids=lambda value: None if isinstance(value, str) else json.dumps(value)[:60] if isinstance(value, dict | list) else str(value[:20]),
)
def test_hostile_header(tmp_path: Path, header: Any, reason: str) -> None:
    message = refusal(write(tmp_path, header))
    assert reason in message
    assert message.isprintable(), "escape sequences of a name must not reach a terminal"


def test_a_refusal_allocates_nothing_of_what_is_claimed(tmp_path: Path) -> None:
    """A file of 8 TiB on paper, with a tensor to match: opening it costs a header's worth of memory."""
    header = {
        "a": {"dtype": "U8", "shape": [2**43], "data_offsets": [0, 2**43]},
        "b": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]},
    }
    write(tmp_path, header, data=0)
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + 2**43)
    tracemalloc.start()
    try:
        assert "overlap" in refusal(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def opens_or_refuses(folder: Path) -> None:
    """The property of all fuzzing here; what opens must also be valid to the format's own library, with the same table."""
    size = (folder / "model.safetensors").stat().st_size
    tracemalloc.start()
    try:
        store = TensorStore.open(folder)
    except CheckpointError as error:
        assert len(error.message.splitlines()) == 1
        return
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 20, "bounded by the file, whatever it claims"
    with store, safe_open(folder / "model.safetensors", "np") as judge:
        assert set(judge.keys()) == set(store.tensors)
        for info in store.tensors.values():
            assert tuple(judge.get_slice(info.name).get_shape()) == info.shape
            assert info.offset + info.nbytes <= size
            assert store.read(info).nbytes == info.nbytes


@FUZZ
@given(data=st.data())
def test_fuzz_bytes(tmp_path: Path, data: st.DataObject) -> None:
    """Bytes of a valid file replaced, dropped, doubled."""
    content = bytearray(save({"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.ones(4, np.float16)}, {"format": "pt"}))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        kind = data.draw(st.sampled_from(["byte", "digit", "drop", "double", "cut"]))
        if kind == "byte":
            content[at] = data.draw(st.integers(0, 255))
        elif kind == "digit":
            content[at] = ord(data.draw(st.sampled_from(string.digits + '"[]{},:-')))
        elif kind == "drop":
            del content[at : at + data.draw(st.integers(1, 9))]
        elif kind == "double":
            content[at:at] = content[at : at + data.draw(st.integers(1, 40))]
        else:
            del content[at:]
        content = content or bytearray(b"\0")
    (tmp_path / "model.safetensors").write_bytes(content)
    opens_or_refuses(tmp_path)


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
SMALL = st.integers(0, 5)
NEARLY_AN_ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "I8", "F4", "C64", "F8_E8M0"]) | ANY_JSON,
        "shape": st.lists(SMALL, max_size=3) | ANY_JSON,
        "data_offsets": st.tuples(SMALL, st.integers(0, 40)) | ANY_JSON,
    }
)


@FUZZ
@given(header=st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]) | st.text(max_size=5), NEARLY_AN_ENTRY | ANY_JSON, max_size=4))
def test_fuzz_values(tmp_path: Path, header: dict[str, Any]) -> None:
    """Well-formed JSON of any content."""
    opens_or_refuses(write(tmp_path, json.dumps(header).encode("utf-8", "surrogatepass")))


@FUZZ
@given(
    shapes=st.lists(st.lists(SMALL, max_size=3).map(tuple), max_size=5),
    dtype=st.sampled_from([np.float32, np.float16, np.int8, np.bool_, np.uint64]),
)
def test_whatever_the_library_writes_opens(tmp_path: Path, shapes: list[tuple[int, ...]], dtype: type) -> None:
    written = {f"t{i}": np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape) for i, shape in enumerate(shapes)}
    (tmp_path / "model.safetensors").write_bytes(save(written))
    with TensorStore.open(tmp_path) as store:
        assert {name: info.shape for name, info in store.tensors.items()} == {name: array.shape for name, array in written.items()}
        for name, array in written.items():
            assert store.read(store.tensors[name]).tobytes() == array.tobytes()


def test_the_judge_refuses_too(tmp_path: Path) -> None:
    """The library that the fuzz tests trust does reject a bad file."""
    write(tmp_path, changed("b", data_offsets=[20, 28]))
    with pytest.raises(SafetensorError):
        safe_open(tmp_path / "model.safetensors", "np").__enter__()
