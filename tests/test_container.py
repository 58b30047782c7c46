"""effllm.json: written and read back, every way it can be invalid, and checked against the headers of the weights."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from effllm.offload.checkpoint import CheckpointError, TensorStore
from effllm.offload.shards import Planned, plan_files
from effllm.quant.spec import QuantSpec
from effllm.runtime.stores.container import FILE, VERSION, Container, StoredTensor, check_stored, read_container

LOW = StoredTensor("w", QuantSpec.parse("4bit"), (40, 100), 0xDEADBEEF, -21.5)
RAW = StoredTensor("norm", QuantSpec.raw("bf16"), (100,), 7)
WHOLE = Container("4bit", 4.5, {"w": LOW, "norm": RAW}, {"model": "fable"}, {"name": "effllm"}, {"name": "rtn"}, {})


def write(folder: Path, change: Callable[[dict], object] = lambda raw: None) -> Path:
    raw = json.loads(WHOLE.to_json())
    change(raw)
    (folder / FILE).write_text(json.dumps(raw))
    return folder


def refusal(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        read_container(folder)
    assert FILE in caught.value.message and caught.value.hint and len(caught.value.message.splitlines()) == 1
    return caught.value


def test_what_is_written_is_read(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(WHOLE.to_json())
    assert read_container(tmp_path) == WHOLE
    assert read_container(tmp_path).to_json() == WHOLE.to_json()


@pytest.mark.parametrize(("stated", "read"), [("MIT", "MIT"), (None, None), (True, None), (["MIT"], None), (0.5, None)], ids=repr)
def test_a_licence_is_a_text_or_none(tmp_path: Path, stated: object, read: str | None) -> None:
    assert read_container(write(tmp_path, lambda raw: raw["source"].update(licence=stated))).licence == read


def test_a_line_per_tensor_and_the_documented_head() -> None:
    raw = json.loads(WHOLE.to_json())
    assert list(raw) == ["format", "version", "spec", "bits_per_weight", "source", "tool", "method", "calibration", "tensors"]
    assert (raw["format"], raw["version"]) == ("effllm-weights", 1)
    assert raw["tensors"]["w"] == {"spec": "codebook4:16", "shape": [40, 100], "crc32": 0xDEADBEEF, "error_db": -21.5}
    lines = WHOLE.to_json().splitlines()
    assert sum(line.startswith('  "') for line in lines) == 5


def test_an_ordinary_checkpoint_has_none(tmp_path: Path) -> None:
    assert read_container(tmp_path) is None
    assert read_container(tmp_path / "absent") is None


def test_a_newer_version_says_what_to_do(tmp_path: Path) -> None:
    error = refusal(write(tmp_path, lambda raw: raw.update(version=VERSION + 1, tensors="something new")))
    assert f"version {VERSION + 1}" in error.message and f"up to {VERSION}" in error.message and "upgrade" in error.hint


@pytest.mark.parametrize("change", [
    lambda raw: raw.update(format="gguf"),
    lambda raw: raw.pop("format"),
    lambda raw: raw.update(version=0),
    lambda raw: raw.update(version=True),
    lambda raw: raw.update(version="1"),
    lambda raw: raw.update(spec=4),
    lambda raw: raw.update(bits_per_weight="4"),
    lambda raw: raw.update(bits_per_weight=-1),
    lambda raw: raw.update(bits_per_weight=True),
    lambda raw: raw.update(source=[]),
    lambda raw: raw.pop("calibration"),
    lambda raw: raw.update(tensors={}),
    lambda raw: raw.update(tensors=[]),
    lambda raw: raw["tensors"].update(w=4),
    lambda raw: raw["tensors"]["w"].pop("spec"),
    lambda raw: raw["tensors"]["w"].update(spec="codebook7:16"),
    lambda raw: raw["tensors"]["w"].update(spec=["4bit"]),
    lambda raw: raw["tensors"]["w"].update(shape=[40]),
    lambda raw: raw["tensors"]["w"].update(shape=[40, 0]),
    lambda raw: raw["tensors"]["w"].update(shape=[40, -1]),
    lambda raw: raw["tensors"]["w"].update(shape=[2**40, 2**40]),
    lambda raw: raw["tensors"]["w"].update(shape=[True, 1]),
    lambda raw: raw["tensors"]["w"].update(crc32=-1),
    lambda raw: raw["tensors"]["w"].update(crc32=2**32),
    lambda raw: raw["tensors"]["w"].update(crc32=None),
    lambda raw: raw["tensors"]["w"].update(error_db="good"),
])
def test_altered_files_are_refused(tmp_path: Path, change: Callable[[dict], object]) -> None:
    refusal(write(tmp_path, change))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": NaN}', "\xff", "[" * 100_000])
def test_damaged_text_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text, encoding="latin-1")
    refusal(tmp_path)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    text = WHOLE.to_json().rstrip()
    for cut in range(0, len(text), 13):
        (tmp_path / FILE).write_text(text[:cut])
        refusal(tmp_path)


def stored_folder(folder: Path, tensors: list[Planned]) -> TensorStore:
    (file,) = plan_files([tensors], {})
    (folder / file.name).write_bytes(file.head + bytes(file.size - len(file.head)))
    return TensorStore.open(folder)


NBYTES = LOW.nbytes


def test_headers_agree(tmp_path: Path) -> None:
    """Padding between tensors belongs to nobody and is no surprise."""
    with stored_folder(tmp_path, [Planned("norm", "BF16", (100,), 200), Planned("w", "U8", (NBYTES,), NBYTES)]) as store:
        assert len(store.tensors) == 3
        check_stored(WHOLE, store)


@pytest.mark.parametrize("tensors, named", [
    ([Planned("norm", "BF16", (100,), 200)], "'w', which no weight file holds"),
    ([Planned("norm", "BF16", (100,), 200), Planned("w", "U8", (NBYTES - 64,), NBYTES - 64)], "'w' as U8"),
    ([Planned("norm", "BF16", (100,), 200), Planned("w", "I8", (NBYTES,), NBYTES)], "'w' as I8"),
    ([Planned("norm", "BF16", (100,), 200), Planned("w", "BF16", (40, 100), 8000)], "'w' as BF16"),
    ([Planned("norm", "F16", (100,), 200), Planned("w", "U8", (NBYTES,), NBYTES)], "'norm' as F16"),
    ([Planned("norm", "BF16", (100,), 200), Planned("w", "U8", (NBYTES,), NBYTES), Planned("x", "U8", (4,), 4)], "'x', which effllm.json"),
])
def test_a_tensor_that_differs_is_named(tmp_path: Path, tensors: list[Planned], named: str) -> None:
    with stored_folder(tmp_path, tensors) as store, pytest.raises(CheckpointError, match=re.escape(named)):
        check_stored(WHOLE, store)
