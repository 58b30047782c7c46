"""torch.save files: their tensors are found without executing anything, and a file that holds something else, or less than it says, is
refused in one line."""

import io
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from effllm.offload.checkpoint import CheckpointError
from effllm.offload.torch_checkpoint import open_torch_checkpoint

RANDOM = torch.Generator().manual_seed(1)
TENSORS = {"a": torch.randn(3, 5, generator=RANDOM), "b": torch.randn(7, generator=RANDOM).to(torch.bfloat16),
           "c": torch.arange(12).reshape(3, 4), "d": torch.randn(2, 3, generator=RANDOM).half(), "e": torch.tensor(2.5),
           "f": torch.tensor([True, False]), "g": torch.arange(5, dtype=torch.int32)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pytorch_model.bin"


@pytest.mark.parametrize("made", (dict, OrderedDict, lambda tensors: {
        name: torch.nn.Parameter(each, False) for name, each in tensors.items()}))
def test_tensors_are_those_that_torch_reads(path: Path, made: type) -> None:
    torch.save(made(TENSORS), path)
    with open_torch_checkpoint(path) as store:
        assert store.tensors.keys() == TENSORS.keys()
        for name, theirs in torch.load(path, weights_only=True).items():
            info = store.tensors[name]
            assert info.shape == tuple(theirs.shape)
            assert np.array_equal(store.read(info), theirs.detach().reshape(-1).contiguous().view(torch.uint8).numpy())


def test_a_module_and_views_of_one_storage(path: Path) -> None:
    module, whole = torch.nn.Linear(4, 6), torch.randn(6, 4)
    torch.save(module.state_dict() | {"upper": whole[:2], "lower": whole[2:]}, path)
    with open_torch_checkpoint(path) as store:
        lower, weight = (store.read(store.tensors[name]).view(np.float32) for name in ("lower", "weight"))
    assert np.array_equal(lower, whole[2:].numpy().ravel()) and np.array_equal(weight, module.weight.detach().numpy().ravel())


class Runs:
    """Somebody's code."""

    def __init__(self, called: object, *given: object) -> None:
        self.called, self.given = called, given

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.called, self.given


def test_code_is_named_and_not_run(path: Path, tmp_path: Path) -> None:
    evidence = tmp_path / "ran"
    for called, given_, named in ((eval, (f"open({str(evidence)!r}, 'w')",), "__builtin__.eval"),
                                  (exec, ("raise SystemExit",), "__builtin__.exec")):
        torch.save({"a": torch.ones(2), "b": Runs(called, *given_)}, path)
        with pytest.raises(CheckpointError, match=f"calling .*{named}.*: none of it was executed") as caught:
            open_torch_checkpoint(path)
        assert "weights_only=True" in caught.value.hint
    assert not evidence.exists()


def archive(path: Path, text: bytes, members: dict[str, bytes], how: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", how) as made:
        for name, content in {"archive/data.pkl": text, **members}.items():
            made.writestr(name, content)


def torch_pickle(path: Path, value: object) -> tuple[bytes, dict[str, bytes]]:
    torch.save(value, path)
    with zipfile.ZipFile(path) as found:
        parts = {name.partition("/")[2]: found.read(name) for name in found.namelist()}
    return parts.pop("data.pkl"), {f"archive/{name}": content for name, content in parts.items()}


def test_what_is_not_there_is_reported(path: Path) -> None:
    text, members = torch_pickle(path, {"a": torch.ones(4, 4)})
    for change, said in (({"archive/data/0": b"\0" * 60}, "lacks the bytes of tensor"),
                         ({"archive/byteorder": b"big"}, "another byte order"),
                         ({"other/data.pkl": text}, "holds no table of tensors")):
        archive(path, text, members | change)
        with pytest.raises(CheckpointError, match=said):
            open_torch_checkpoint(path)
    archive(path, text, members, zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="a compressed member"):
        open_torch_checkpoint(path)
    torch.save({"a": torch.ones(4, 3).T}, path)
    with pytest.raises(CheckpointError, match="is not contiguous"):
        open_torch_checkpoint(path)
    torch.save({"a": 1}, path)
    with pytest.raises(CheckpointError, match="holds no tensors by name"):
        open_torch_checkpoint(path)
    for content in (b"", b"PK\x03\x04 and no more", pickle.dumps({"a": 1})):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="not a tensor archive"):
            open_torch_checkpoint(path)
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="saved by torch before 1.6"):
        open_torch_checkpoint(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_table_is_an_error_of_its_own(path: Path, data: st.DataObject) -> None:
    """Whatever bytes are changed: tensors within the file, or a line; never another exception, nor much memory."""
    text, members = torch_pickle(path, TENSORS)
    spoiled = bytearray(text)
    for _ in range(data.draw(st.integers(1, 3))):
        spoiled[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    archive(path, bytes(spoiled), members)
    try:
        with open_torch_checkpoint(path) as store:
            for info in store.tensors.values():
                assert store.read(info).nbytes == info.nbytes
    except CheckpointError as error:
        assert str(path) in error.message and error.hint


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.floats(0, 1), cut=st.booleans(), value=st.integers(0, 255))
def test_a_damaged_archive_is_one_too(path: Path, at: float, cut: bool, value: int) -> None:
    torch.save({"a": torch.ones(8)}, buffer := io.BytesIO())
    spoiled = bytearray(buffer.getvalue())
    place = int(at * (len(spoiled) - 1))
    if cut:
        del spoiled[place:]
    else:
        spoiled[place] = value
    path.write_bytes(spoiled)
    try:
        with open_torch_checkpoint(path) as store:
            assert all(store.read(info).nbytes == info.nbytes for info in store.tensors.values())
    except CheckpointError as error:
        assert str(path) in error.message and error.hint
