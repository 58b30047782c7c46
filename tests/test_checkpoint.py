"""Checkpoint folders: single, sharded and lone files, ranged reads, and every way a folder can be incomplete or unreadable."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from effllm import EffllmError, ModelNotFound
from effllm.offload.checkpoint import CheckpointError, TensorStore

FABLE = Path(__file__).resolve().parent.parent / "models" / "fable"
INDEX = "model.safetensors.index.json"
NOBODY = 65534


@pytest.fixture(scope="module")
def whole() -> Iterator[TensorStore]:
    with TensorStore.open(FABLE) as store:
        yield store


def shard(folder: Path, shards: int = 3) -> dict[str, str]:
    """The fable model cut into `shards` files with an index; returns the weight map."""
    with TensorStore.open(FABLE) as store:
        infos = list(store.tensors.values())
        weight_map = {}
        for i in range(shards):
            part, name = infos[i::shards], f"model-{i + 1:05}-of-{shards:05}.safetensors"
            save_file({info.name: store.read(info).view(np.uint16).reshape(info.shape) for info in part}, folder / name)
            weight_map |= {info.name: name for info in part}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    return weight_map


def refusal(folder: Path | str, kind: type[EffllmError] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        TensorStore.open(folder)
    assert caught.value.hint
    assert len(caught.value.message.splitlines()) == 1
    return caught.value.message


# -- reading -------------------------------------------------------------------------------------------------------------------


def test_table_agrees_with_the_library(whole: TensorStore) -> None:
    with safe_open(FABLE / "model.safetensors", "np") as judge:
        assert set(whole.tensors) == set(judge.keys())
        for info in whole.tensors.values():
            assert list(info.shape) == judge.get_slice(info.name).get_shape()
            assert info.dtype == judge.get_slice(info.name).get_dtype()
    assert whole.files == (FABLE / "model.safetensors",)
    assert whole.nbytes == sum(info.nbytes for info in whole.tensors.values())


def test_bytes_agree_with_the_file(whole: TensorStore) -> None:
    content = (FABLE / "model.safetensors").read_bytes()
    for info in whole.tensors.values():
        assert whole.read(info).tobytes() == content[info.offset : info.offset + info.nbytes]


def test_row_ranges(whole: TensorStore) -> None:
    info = whole.tensors["model.embed_tokens.weight"]
    rows = whole.read(info).reshape(info.shape[0], -1)
    for begin, end in [(0, 1), (1, 3), (5, 5), (info.shape[0] - 1, info.shape[0]), (info.shape[0], info.shape[0])]:
        assert whole.read(info, begin, end).tobytes() == rows[begin:end].tobytes()
    for begin, end in [(-1, 1), (2, 1), (0, info.shape[0] + 1)]:
        with pytest.raises(ValueError, match="rows"):
            whole.read(info, begin, end)


def test_scalars_and_empty_tensors(tmp_path: Path) -> None:
    save_file(
        {"scalar": np.array(2.5, np.float32), "empty": np.zeros((0, 4), np.float32), "flat": np.zeros((4, 0), np.int8)},
        tmp_path / "model.safetensors",
    )
    with TensorStore.open(tmp_path) as store:
        assert store.read(store.tensors["scalar"]).view(np.float32) == [2.5]
        assert store.read(store.tensors["empty"]).size == 0
        assert store.read(store.tensors["flat"], 1, 3).size == 0
        store.read_into(store.tensors["empty"], np.empty(0, np.uint8))


def test_read_into_fills_a_buffer_of_exactly_the_size(whole: TensorStore) -> None:
    info = whole.tensors["model.norm.weight"]
    out = np.zeros(info.nbytes // 2, np.uint16)
    whole.read_into(info, out)
    assert out.tobytes() == whole.read(info).tobytes()
    with pytest.raises(ValueError, match="the buffer"):
        whole.read_into(info, out[:-1])


def test_reads_from_many_threads(whole: TensorStore) -> None:
    infos = list(whole.tensors.values()) * 3
    with ThreadPoolExecutor(8) as pool:
        for info, found in zip(infos, pool.map(whole.read, infos), strict=True):
            assert found.tobytes() == whole.read(info).tobytes()


def test_sharded_equals_whole(tmp_path: Path, whole: TensorStore) -> None:
    weight_map = shard(tmp_path)
    with TensorStore.open(tmp_path) as store:
        assert {name: info.shape for name, info in store.tensors.items()} == {name: info.shape for name, info in whole.tensors.items()}
        assert {name: info.file.name for name, info in store.tensors.items()} == weight_map
        assert (len(store.files), store.nbytes) == (3, whole.nbytes)
        for name, info in store.tensors.items():
            assert store.read(info).tobytes() == whole.read(whole.tensors[name]).tobytes()


def test_lone_file_under_another_name(tmp_path: Path) -> None:
    save_file({"w": np.ones(3, np.float32)}, tmp_path / "consolidated.safetensors")
    (tmp_path / "._consolidated.safetensors").write_bytes(b"left by another system")
    with TensorStore.open(str(tmp_path)) as store:
        assert list(store.tensors) == ["w"]


def test_opening_reads_no_weight_byte(tmp_path: Path) -> None:
    """A sparse file of 1 TiB opens, and the kernel counts less than a header's worth of bytes read."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [2**38], "data_offsets": [0, 2**40]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, path.stat().st_size + 2**40)
    counters = Path("/proc/self/io")
    if not counters.exists():
        pytest.skip("this kernel does not count bytes read")

    def bytes_read() -> int:
        return int(counters.read_text().split()[1])

    own_cost = -bytes_read() + bytes_read()
    before = bytes_read()
    with TensorStore.open(tmp_path) as store:
        assert bytes_read() - before - own_cost <= 8 + len(header) + 16
        assert store.nbytes == 2**40
        assert store.read(store.tensors["w"], 2**37, 2**37 + 2).tobytes() == bytes(8)


def test_closed_store_refuses_to_read() -> None:
    store = TensorStore.open(FABLE)
    info = store.tensors["model.norm.weight"]
    store.close()
    store.close()
    with pytest.raises(ValueError, match="not open"):
        store.read(info)


def test_no_descriptor_is_left_behind(tmp_path: Path) -> None:
    def held() -> int:
        return len(os.listdir("/proc/self/fd"))

    shard(tmp_path)
    before = held()
    with TensorStore.open(tmp_path):
        assert held() == before + 3
    assert held() == before
    (tmp_path / "model-00003-of-00003.safetensors").write_bytes(b"cut")
    refusal(tmp_path)
    assert held() == before


def test_file_that_shrinks_after_its_header(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": np.ones(1000, np.float32)}, path)
    with TensorStore.open(tmp_path) as store:
        store.check_unchanged()
        os.truncate(path, 2000)
        with pytest.raises(CheckpointError, match="became shorter") as caught:
            store.read(store.tensors["w"])
        assert str(path) in caught.value.message
        with pytest.raises(CheckpointError, match="changed while"):
            store.check_unchanged()


def test_replaced_folder_keeps_reading_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": np.ones(4, np.float32)}, path)
    with TensorStore.open(tmp_path) as store:
        save_file({"w": np.zeros(4, np.float32)}, tmp_path / "new")
        os.replace(tmp_path / "new", path)
        assert store.read(store.tensors["w"]).view(np.float32).tolist() == [1, 1, 1, 1]


# -- shards and indexes ----------------------------------------------------------------------------------------------------------


def test_missing_shards_are_named(tmp_path: Path) -> None:
    shard(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert "lacks 1 of 3 weight files: model-00002-of-00003.safetensors" in refusal(tmp_path)


def test_many_missing_shards_stay_one_line(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {f"t{i}": f"{i:03}.safetensors" for i in range(500)}}))
    assert refusal(tmp_path).endswith("lacks 500 of 500 weight files: 000.safetensors, 001.safetensors, 002.safetensors and 497 more")


def test_index_names_a_tensor_that_the_shard_lacks(tmp_path: Path) -> None:
    weight_map = shard(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {**weight_map, "ghost": "model-00001-of-00003.safetensors"}}))
    assert "'ghost' in model-00001-of-00003.safetensors, which does not hold it" in refusal(tmp_path)


def test_index_places_a_tensor_in_the_wrong_shard(tmp_path: Path) -> None:
    weight_map = shard(tmp_path)
    other = {"model.norm.weight": next(name for name in weight_map.values() if name != weight_map["model.norm.weight"])}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map | other}))
    assert f"'model.norm.weight' in {other['model.norm.weight']}, which does not hold it" in refusal(tmp_path)


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"w": np.ones(1, np.float32)}, tmp_path / f"{name}.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}))
    assert "holds tensor 'w', which a.safetensors holds too" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ({}, "no weight_map"),
        ({"weight_map": []}, "no weight_map"),
        ({"weight_map": {}}, "no weight_map"),
        ([], "not a JSON object"),
        ({"weight_map": {"w": 3}}, "not the name of a file"),
        ({"weight_map": {"w": "../model.safetensors"}}, "not the name of a file"),
        ({"weight_map": {"w": "/etc/model.safetensors"}}, "not the name of a file"),
        ({"weight_map": {"w": "a\n\x1b[2J.safetensors"}}, "not the name of a file"),
        ({"weight_map": {"w": "x" * 300 + ".safetensors"}}, "not the name of a file"),
        ({"weight_map": {"w": "pytorch_model.bin"}}, "not a safetensors file"),
    ],
)
def test_hostile_index(tmp_path: Path, index: object, reason: str) -> None:
    (tmp_path / INDEX).write_text(json.dumps(index))
    message = refusal(tmp_path)
    assert reason in message
    assert message.isprintable()


def test_damaged_and_oversized_index(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(b'{"weight_map": {"w": ')
    assert "damaged index" in refusal(tmp_path)
    os.truncate(tmp_path / INDEX, 2**40)
    assert "more than the" in refusal(tmp_path)


def test_shards_without_an_index(tmp_path: Path) -> None:
    shard(tmp_path)
    (tmp_path / INDEX).unlink()
    assert f"3 safetensors files but no {INDEX}" in refusal(tmp_path)


# -- folders that are no checkpoint ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "last.ckpt"])
def test_pickle_is_refused_unopened(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(CheckpointError) as caught:
        TensorStore.open(tmp_path)
    assert name in caught.value.message and "can execute any code" in caught.value.message
    assert "safe_serialization=True" in caught.value.hint


def test_safetensors_beside_pickle_wins(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"never opened")
    save_file({"w": np.ones(1, np.float32)}, tmp_path / "model.safetensors")
    with TensorStore.open(tmp_path) as store:
        assert list(store.tensors) == ["w"]


def test_adapter_is_no_model(tmp_path: Path) -> None:
    save_file({"lora_A": np.ones(1, np.float32)}, tmp_path / "adapter_model.safetensors")
    assert "LoRA adapter" in refusal(tmp_path)


def test_not_a_model_folder(tmp_path: Path) -> None:
    assert "there is no model folder" in refusal(tmp_path / "absent", ModelNotFound)
    assert "there is no model folder" in refusal("nul\0byte", ModelNotFound)
    assert "there is no model folder" in refusal("x" * 5000, ModelNotFound)
    assert "no safetensors weights" in refusal(tmp_path, ModelNotFound)
    assert "is a file, not a model folder" in refusal(FABLE / "model.safetensors", ModelNotFound)


def test_weights_that_are_not_files(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.mkdir()
    assert "not a regular file" in refusal(tmp_path)
    path.rmdir()
    os.mkfifo(path)
    assert "not a regular file" in refusal(tmp_path)
    path.unlink()
    path.symlink_to("/dev/zero")
    assert "not a regular file" in refusal(tmp_path)
    path.unlink()
    path.symlink_to("gone")
    assert "cannot be opened: No such file" in refusal(tmp_path)


OPEN_AS_NOBODY = """
import os, sys
from effllm import EffllmError
from effllm.offload.checkpoint import TensorStore
if os.geteuid() == 0:
    os.setgroups([]); os.setgid({nobody}); os.setuid({nobody})
try:
    print("opened", len(TensorStore.open(sys.argv[1]).tensors))
except EffllmError as error:
    print(type(error).__name__, error.exit_code, error.message)
"""


def open_unprivileged(folder: Path) -> str:
    """What a process without root's rights says: root reads whatever the mode bits forbid."""
    command = [sys.executable, "-c", OPEN_AS_NOBODY.format(nobody=NOBODY), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def test_no_permission() -> None:
    # Not tmp_path: its parents are closed to other users, which would hide what is tested.
    with tempfile.TemporaryDirectory() as parent:
        folder, weights = Path(parent) / "model", Path(parent) / "model" / "model.safetensors"
        folder.mkdir()
        save_file({"w": np.ones(1, np.float32)}, weights)
        os.chmod(parent, 0o755)
        folder.chmod(0o755)
        weights.chmod(0o644)
        assert open_unprivileged(folder) == "opened 1"
        weights.chmod(0)
        assert open_unprivileged(folder) == f"ModelNotFound 3 no permission to read {weights}"
        weights.chmod(0o644)
        folder.chmod(0)
        try:
            assert open_unprivileged(folder) == f"ModelNotFound 3 no permission to read the model folder {folder}"
        finally:
            folder.chmod(0o755)
