"""Model folders in which a pipe, a device, a folder or a sparse file stands in place of a small file: a one-line error, at once."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import effllm
from effllm import EffllmError
from effllm.runtime.config import read_config
from effllm.runtime.config_reader import ConfigError
from effllm.runtime.files.bounded_read import IrregularFile, read_bounded, read_text
from effllm.runtime.hub import stated_licence
from effllm.runtime.library.local_model import has_template
from effllm.runtime.sampling.generation_config import read_generation_config
from effllm.runtime.tokenizer import Tokenizer

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
PATIENCE_S = 20


def hole(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


ODD = {"a pipe": os.mkfifo, "a device": endless, "a folder": Path.mkdir, "a hole": hole}


@pytest.fixture(autouse=True)
def patience() -> Iterator[None]:
    """What waits for a pipe waits for ever."""
    def over(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(PATIENCE_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for path in FABLE.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, tmp_path)
    return tmp_path


def put(folder: Path, name: str, made: Callable[[Path], None]) -> None:
    (folder / name).unlink(missing_ok=True)
    made(folder / name)


@pytest.mark.parametrize("made", ODD.values(), ids=ODD)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
                                  "chat_template.json", "special_tokens_map.json"])
def test_a_small_file_that_is_none_is_named(folder: Path, name: str, made: Callable[[Path], None]) -> None:
    config = read_config(folder)
    put(folder, name, made)
    with pytest.raises(EffllmError) as caught:
        read_config(folder)
        read_generation_config(folder)
        Tokenizer.load(folder, config)
    assert f"{folder / name}"[-200:] in caught.value.message or f"{folder} has no {name}" in caught.value.message
    assert "Errno" not in caught.value.message and caught.value.hint


@pytest.mark.parametrize("made", ODD.values(), ids=ODD)
def test_what_is_only_shown_is_left_out(folder: Path, made: Callable[[Path], None]) -> None:
    for name in ("README.md", "tokenizer_config.json"):
        put(folder, name, made)
    assert stated_licence(folder) is None and not has_template(folder)


def test_a_template_that_nests_too_deeply(folder: Path) -> None:
    config = read_config(folder)
    (folder / "chat_template.json").write_text("[" * 100_000)
    with pytest.raises(EffllmError, match=r"chat_template\.json") as caught:
        Tokenizer.load(folder, config)
    assert caught.value.hint


@pytest.mark.parametrize("text", ["[]", "{", json.dumps({"model_type": "llama", "hidden_size": "x"}), json.dumps({"model_type": "llama"})])
def test_what_is_wrong_with_a_config_has_a_next_step(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_config(folder)
    assert caught.value.hint


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes("one\r\ntwo\rthree\u00e9\n".encode())
    assert read_bounded(path, path.stat().st_size) == path.read_bytes()
    assert read_text(path, 100) == path.read_text(encoding="utf-8") == "one\ntwo\nthree\u00e9\n"
    with pytest.raises(IrregularFile) as caught:
        read_bounded(path, path.stat().st_size - 1)
    assert "at most" in caught.value.strerror
    with pytest.raises(FileNotFoundError):
        read_bounded(tmp_path / "b", 10)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="files that a system makes up are Linux's")
def test_a_file_that_states_no_size_is_held_to_the_bound() -> None:
    """As those that a system makes up do."""
    assert read_bounded(Path("/proc/self/status"), 1 << 16)
    with pytest.raises(IrregularFile, match="more than the 10 bytes"):
        read_bounded(Path("/proc/self/status"), 10)
