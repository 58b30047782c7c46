"""GGUF headers as an attacker or a broken download would leave them: a valid table or a one-line error that names the problem, cheaply."""

import os
import struct
import tracemalloc
from pathlib import Path

import pytest
from gguf_bytes import ARRAY, STRING, U32, file, pair, small_model, tensor, text
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from effllm import EffllmError
from effllm.offload.checkpoint import CheckpointError, open_regular_file
from effllm.offload.gguf_header import MAX_KEYS, MAX_STRINGS, MAX_TENSORS, MAX_TEXT, GgufHeader, read_gguf_header
from effllm.runtime.gguf.store import open_gguf_store
from effllm.runtime.gguf.tokenizer import load_tokenizer

FUZZ = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])

GOOD_PAIRS = [pair("general.architecture", STRING, text("llama")), pair("a.number", U32, struct.pack("<I", 7)),
              pair("a.list", ARRAY, struct.pack("<IQ", STRING, 2) + text("x") + text("yy")),
              pair("a.array", ARRAY, struct.pack("<IQ3f", 6, 3, 1.0, 2.0, 3.0))]
GOOD_TENSORS = [tensor("one", (8, 3), 0, 0), tensor("two", (32, 2), 2, 96)]


def parsed(raw: bytes, folder: Path) -> GgufHeader:
    path = folder / "m.gguf"
    path.write_bytes(raw)
    opened = open_regular_file(path)
    try:
        return read_gguf_header(path, opened.fd)
    finally:
        os.close(opened.fd)


def refusal(raw: bytes, folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        parsed(raw, folder)
    message = caught.value.message
    assert caught.value.hint and len(message.splitlines()) == 1 and len(message) < 500 + len(str(folder))
    return message.removeprefix(str(folder / "m.gguf"))


def test_a_good_file(tmp_path: Path) -> None:
    header = parsed(file(GOOD_PAIRS, GOOD_TENSORS), tmp_path)
    assert header.metadata["general.architecture"] == "llama" and header.metadata["a.number"] == 7
    assert header.metadata["a.list"] == ["x", "yy"] and header.metadata["a.array"].tolist() == [1.0, 2.0, 3.0]
    one, two = header.tensors["one"], header.tensors["two"]
    assert (one.type, one.shape, one.nbytes) == ("F32", (3, 8), 96) and one.offset % 32 == 0
    assert (two.type, two.shape, two.nbytes, two.offset - one.offset, two.row_nbytes) == ("Q4_0", (2, 32), 36, 96, 18)


def test_every_kind_of_value(tmp_path: Path) -> None:
    values = {0: ("B", 200), 1: ("b", -5), 2: ("H", 60000), 3: ("h", -3), 4: ("I", 1 << 31), 5: ("i", -9), 6: ("f", 0.5), 7: ("?", True),
              10: ("Q", 1 << 63), 11: ("q", -(1 << 62)), 12: ("d", 0.1)}
    pairs = [pair(f"k{kind}", kind, struct.pack(f"<{code}", value)) for kind, (code, value) in values.items()]
    header = parsed(file(pairs, []), tmp_path)
    assert {key: value for key, value in header.metadata.items()} == {f"k{kind}": value for kind, (_, value) in values.items()}
    assert header.metadata["k7"] is True and type(header.metadata["k4"]) is int


@pytest.mark.parametrize(("raw", "said"), [
    (b"", "is cut short"),
    (b"GGUF" + bytes(10), "is cut short"),
    (b"version https://git-lfs" + bytes(20), "Git LFS pointer"),
    (b"PK\x03\x04" + bytes(40), "is not a GGUF file: its first four bytes are not GGUF"),
    (b"<!doctype html>" + b" " * 40, "is a web page, not the weights"),
    (bytes(40), "begins with zeros"),
    (file([], [], version=1), "GGUF version 1"),
    (b"GGUF" + struct.pack(">I", 3) + bytes(40), "big-endian"),
    (file([], [], counts=(MAX_TENSORS + 1, 0)), "tensors, more than"),
    (file([], [], counts=(0, MAX_KEYS + 1)), "keys, more than"),
    (file([], [], counts=(1 << 60, 1 << 60)), "tensors, more than"),
    (file([], [], counts=(100_000, 0)), "its list of 100000 tensors"),
    (file(GOOD_PAIRS[:1] * 2, []), "'general.architecture' twice"),
    (file([pair("k", 13, b"")], []), "'k' of unknown type 13"),
    (file([pair("k", ARRAY, struct.pack("<IQ", 6, 1 << 60))], []), "'k' with 1152921504606846976 values"),
    (file([pair("k", ARRAY, struct.pack("<IQ", STRING, 1 << 60))], []), "'k' with 1152921504606846976 texts"),
    (file([pair("k", ARRAY, struct.pack("<IQ", STRING, MAX_STRINGS + 1))], []), "texts, more than"),
    (file([pair("k", ARRAY, struct.pack("<IQ", ARRAY, 1))], []), "nested arrays"),
    (file([pair("k", ARRAY, struct.pack("<IQ", 99, 1))], []), "'k' of unknown type 99"),
    (file([pair("k", STRING, struct.pack("<Q", 1 << 62))], []), "'k' of 4611686018427387904 bytes"),
    (file([pair("k", STRING, struct.pack("<Q", MAX_TEXT))], []), "lies about the length of key 'k'"),
    (file([pair("k", ARRAY, struct.pack("<IQQ", STRING, 2, 1 << 63))], []), "a text of 9223372036854775808 bytes"),
    (file([pair("k", STRING, text(b"\xff\xfe"))], []), "not UTF-8"),
    (file([pair("k", ARRAY, struct.pack("<IQ", STRING, 1) + text(b"\xff"))], []), "not UTF-8"),
    (file([pair("k", 7, b"\x02")], []), "neither true nor false"),
    (file([struct.pack("<Q", 1 << 40)], []), "a key of 1099511627776 bytes"),
    (file([pair("general.alignment", U32, struct.pack("<I", 0))], []), "general.alignment 0"),
    (file([pair("general.alignment", U32, struct.pack("<I", 48))], []), "general.alignment 48"),
    (file([pair("general.alignment", STRING, text("32"))], []), "general.alignment '32'"),
    (file([], GOOD_TENSORS[:1] * 2), "'one' twice"),
    (file([], [tensor("t", (4,), 5, 0)]), "'t' of unknown type 5"),
    (file([], [tensor("t", (33,), 2, 0)]), "'t' with rows of 33 values"),
    (file([], [tensor("t", (0, 4), 0, 0)]), "'t' with an impossible shape"),
    (file([], [tensor("t", (1 << 40, 1 << 40), 0, 0)]), "'t' with an impossible shape"),
    (file([], [tensor("t", (1 << 63, 2), 0, 0)]), "'t' with an impossible shape"),
    (file([], [tensor("t", (), 0, 0)]), "of 0 dimensions"),
    (file([], [tensor("t", (1, 1, 1, 1, 1), 0, 0)]), "of 5 dimensions"),
    (file([], [tensor("t", (8,), 0, 4)]), "offset 4"),
    (file([], [tensor("t", (8,), 0, 1 << 62)]), "is cut short: tensor 't'"),
    (file([], [tensor("t", (2048,), 0, 0)]), "is cut short: tensor 't'"),
    (file([], [tensor("t", (64,), 0, 0), tensor("u", (8,), 0, 32)]), "'t' and 'u' that overlap"),
])
def test_what_is_wrong_is_named(tmp_path: Path, raw: bytes, said: str) -> None:
    assert said in refusal(raw, tmp_path)


def test_no_claim_makes_a_large_allocation(tmp_path: Path) -> None:
    claims = [file([pair("k", ARRAY, struct.pack("<IQ", kind, 1 << 60))], []) for kind in (0, 6, 8, 10)]
    claims += [file([], [], counts=(1 << 60, 0)), file([], [tensor("t", (1 << 30, 1 << 17), 0, 0)])]
    tracemalloc.start()
    try:
        for raw in claims:
            refusal(raw, tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_every_cut_is_noticed(tmp_path: Path) -> None:
    raw = file(GOOD_PAIRS, GOOD_TENSORS, data=132)
    for length in range(len(raw) - 1):
        assert refusal(raw[:length], tmp_path)


def used(path: Path) -> None:
    """Everything that reads a header."""
    with open_gguf_store(path) as store:
        for info in store.tensors.values():
            store.read(info)
    load_tokenizer(path, 8)


def test_the_small_model_is_whole(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(small_model())
    used(tmp_path / "m.gguf")
    assert load_tokenizer(tmp_path / "m.gguf", 8).encode("ab") == [1, 7]


@given(st.lists(st.tuples(st.integers(0, 1 << 20), st.binary(min_size=1, max_size=9)), min_size=1, max_size=4), st.integers(0, 40))
@FUZZ
def test_any_change_of_bytes_is_a_model_or_one_line(tmp_path: Path, changes: list[tuple[int, bytes]], cut: int) -> None:
    raw = bytearray(small_model())
    head = raw.index(b"blk.0.ffn_down.weight") + 64  # where a change can matter most
    for at, piece in changes:
        at %= head
        raw[at : at + len(piece)] = piece
    path = tmp_path / "m.gguf"
    path.write_bytes(raw[: len(raw) - cut] if cut > 30 else raw)
    try:
        used(path)
    except EffllmError as error:
        assert error.hint is not None and len(error.message.splitlines()) == 1


@given(st.integers(0, 2000), st.sampled_from([0, 1, 1 << 31, 1 << 32, 1 << 60, (1 << 64) - 1]))
@FUZZ
def test_any_number_in_place_of_any_length(tmp_path: Path, at: int, value: int) -> None:
    """Eight bytes anywhere in the header, as a count or a length would be."""
    raw = bytearray(small_model())
    at %= raw.index(b"blk.0.ffn_down.weight") + 64
    raw[at : at + 8] = value.to_bytes(8, "little")
    (tmp_path / "m.gguf").write_bytes(raw)
    tracemalloc.start()
    try:
        used(tmp_path / "m.gguf")
    except EffllmError as error:
        assert len(error.message.splitlines()) == 1
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 32 << 20
