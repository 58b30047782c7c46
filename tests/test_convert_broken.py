"""Conversions that are killed, run out of disk or get bad input: the same bytes in the end, or a one-line reason."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conversions import FABLE, ODD, check_whole, contents, odd_model, options, run, short_fable
from safetensors.torch import load_file, save_file

from effllm import DoesNotFit, EffllmError, UsageError
from effllm.offload.checkpoint import TensorStore
from effllm.offload.folder_writer import JOURNAL, partial_folder
from effllm.quant.codes import dequantize
from effllm.quant.pack import unpack
from effllm.runtime.config_reader import ConfigError
from effllm.runtime.conversion import convert_stream
from effllm.runtime.convert import ConvertOptions, convert, recipe_of
from effllm.runtime.files.model_folder_files import foreign_entry
from effllm.runtime.stores.container import read_container

MINUTE = 60


@pytest.fixture(scope="module")
def four_bit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("convert") / "fable-4bit"
    run(FABLE, out)
    return out


# -- kills -----------------------------------------------------------------------------------------------------------------------

# Ends its own process by SIGKILL at the n-th call that changes the disk: every state that a kill can leave is a state between two of these.
KILLED = """
import os, signal, sys
from pathlib import Path
from effllm.runtime.convert import convert, ConvertOptions
from effllm.quant.recipe import Recipe
from effllm.quant.spec import QuantSpec
left = int(sys.argv[3])
def counted(name):
    real = getattr(os, name)
    def call(*args, **more):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **more)
    setattr(os, name, call)
for name in ("pwrite", "write", "fdatasync", "fsync", "rename", "replace", "unlink", "ftruncate"):
    if hasattr(os, name):
        counted(name)
for _ in convert(Path(sys.argv[1]), Path(sys.argv[2]), ConvertOptions(Recipe(QuantSpec.parse("4bit")), "4bit")):
    continue
print(left)
"""


def killed_after(calls: int, source: Path, out: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-P", "-c", KILLED, str(source), str(out), str(calls)]
    return subprocess.run(command, capture_output=True, text=True, timeout=2 * MINUTE, check=False)


@pytest.mark.slow
def test_kills_at_random_points_then_the_same_bytes(tmp_path: Path, four_bit: Path) -> None:
    enough = 10_000
    ran = killed_after(enough, FABLE, tmp_path / "whole")
    assert ran.returncode == 0, ran.stderr
    assert contents(tmp_path / "whole") == contents(four_bit)
    calls = enough - int(ran.stdout)
    chance = random.Random()
    points = [chance.randrange(calls) for _ in range(3)] + [calls - 1, calls - 2, calls - 4]
    for point in dict.fromkeys(points):  # chance may name one twice
        out = tmp_path / f"out{point}"
        assert killed_after(point, FABLE, out).returncode == -signal.SIGKILL, point
        if out.exists():  # the name is given by the last step but two
            assert point >= calls - 2 and foreign_entry(out) is None
            if (out / JOURNAL).exists():
                assert any("is complete" in line for line in run(FABLE, out)[1]), point
        else:
            _, said = run(FABLE, out)
            assert point < calls // 2 or any("earlier run stopped" in line or "starting over" in line for line in said), point
        assert contents(out) == contents(four_bit), f"killed after {point} of {calls} calls"
        assert not partial_folder(out).exists()


def test_kill_after_kill_still_arrives(tmp_path: Path, four_bit: Path) -> None:
    """Each attempt gets a little further, none starts again."""
    out, done = tmp_path / "out", -1
    for _ in range(3):
        assert killed_after(120, FABLE, out).returncode == -signal.SIGKILL
        lines = (partial_folder(out) / "journal").read_bytes().count(b"\n")
        assert lines > done
        done = lines
    _, said = run(FABLE, out)
    assert any("earlier run stopped" in line for line in said)
    assert contents(out) == contents(four_bit)


@pytest.mark.parametrize("replace", (True, False))
def test_what_is_put_into_the_place_of_the_result_meanwhile_stays(tmp_path: Path, replace: bool) -> None:
    source, out = short_fable(tmp_path / "source"), tmp_path / "out"
    if replace:
        run(source, out)
    with pytest.raises(UsageError, match="out holds thesis.txt" if replace else "exists and is not a model"):
        for _ in convert(source, out, options(replace=replace)):
            out.mkdir(exist_ok=True)
            (out / "thesis.txt").write_text("mine")
    assert (out / "thesis.txt").read_text() == "mine"
    shutil.move(out / "thesis.txt", tmp_path / "thesis.txt")
    if not replace:
        out.rmdir()
    _, said = run(source, out, options(replace=replace))
    assert any("earlier run stopped" in line for line in said) and read_container(out) is not None


def test_other_options_or_another_source_start_afresh(tmp_path: Path) -> None:
    source = odd_model(tmp_path / "odd")
    out = tmp_path / "out"
    for change in (lambda: options("8bit"), lambda: odd_model(source, change=lambda t: t["lm_head.weight"].fill(0.5)) and options("4bit")):
        killed_after(60, source, out)
        assert partial_folder(out).exists()
        given = change()
        _, said = run(source, out, given)
        assert any("starting over" in line for line in said)
        check_whole(out, source)
        shutil.rmtree(out)


# -- bad input -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "model.layers.0.input_layernorm.weight",
                                  "model.embed_tokens.weight"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_named(tmp_path: Path, name: str, value: float) -> None:
    def harm(tensors: dict[str, np.ndarray]) -> None:
        tensors[name].reshape(-1)[-3] = value

    with pytest.raises(EffllmError, match="NaN or inf") as caught:
        run(odd_model(tmp_path / "odd", change=harm), tmp_path / "out")
    assert name in caught.value.message and caught.value.hint
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["gptq", *(pytest.param(method, marks=pytest.mark.slow) for method in ("smooth", "spqr")), "target"])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"])
def test_methods_that_read_a_text_name_them_too(tmp_path: Path, name: str, method: str) -> None:
    """Nothing is quantized by what a text shows of a model that answers with NaN: it would show nothing."""
    source = short_fable(tmp_path / "short")
    tensors = load_file(source / "model.safetensors")
    tensors[name][:, 100] = np.nan
    (source / "model.safetensors").unlink()
    save_file(tensors, source / "model.safetensors")
    text = "Once upon a time a fox met a king at the river, and they talked about the weather and the price of bread. " * 25
    more = {"target": 4.0} if method == "target" else {"method": method}
    recipe = recipe_of("4bit", (), more.get("method", "rtn"))
    given = ConvertOptions(recipe, "4bit", calibration_text=text, calibration_tokens=512, **more)
    with pytest.raises(EffllmError, match="NaN or infinity") as caught:
        run(source, tmp_path / "out", given)
    assert caught.value.message.startswith(f"{name}: ") and "download it again" in caught.value.hint
    journal = partial_folder(tmp_path / "out") / "journal"
    done = [json.loads(line)[0] for line in journal.read_text().splitlines()[1:]] if journal.exists() else []
    assert not [each for each in done if "embed" in name or "layers.1" in each], done


@pytest.mark.parametrize("spec", ["4bit", "8bit", "affine4:32", "ternary"])
def test_columns_rows_and_tensors_of_zeros(tmp_path: Path, spec: str) -> None:
    def blank(tensors: dict[str, np.ndarray]) -> None:
        for weight in tensors.values():
            if weight.ndim == 2:
                weight[:, 3] = 0
                weight[5] = 0
        tensors["model.layers.0.mlp.up_proj.weight"][:] = 0

    source = odd_model(tmp_path / "odd", change=blank)
    run(source, tmp_path / "out", options(spec))
    made = check_whole(tmp_path / "out", source)
    with TensorStore.open(tmp_path / "out") as store:
        stored = made.tensors["model.layers.0.mlp.up_proj.weight"]
        assert not dequantize(unpack(store.read(store.tensors[stored.name]), stored.spec, stored.shape), stored.spec).any()
        stored = made.tensors["model.layers.0.self_attn.q_proj.weight"]
        assert not dequantize(unpack(store.read(store.tensors[stored.name]), stored.spec, stored.shape), stored.spec)[5].any()


def test_a_quantized_input_is_refused(tmp_path: Path, four_bit: Path) -> None:
    with pytest.raises(UsageError, match="quantized already"):
        run(four_bit, tmp_path / "out")
    source = odd_model(tmp_path / "odd")
    (source / "config.json").write_text(json.dumps(ODD | {"quantization_config": {"quant_method": "bitsandbytes", "bits": 4}}))
    with pytest.raises(ConfigError, match="quantization_config"):
        run(source, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not partial_folder(tmp_path / "out").exists()


def test_what_exists_is_never_overwritten_unasked(tmp_path: Path) -> None:
    source, out = odd_model(tmp_path / "odd"), tmp_path / "out"
    run(source, out)
    before = contents(out)
    with pytest.raises(UsageError, match="exists") as caught:
        run(source, out, options("8bit"))
    assert "--force" in caught.value.hint and contents(out) == before
    run(source, out, options("8bit", replace=True))
    check_whole(out, source)
    assert read_container(out).spec_text == "8bit"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["odd", "out"]


def test_force_deletes_nothing_that_effllm_did_not_write(tmp_path: Path) -> None:
    source = odd_model(tmp_path / "odd")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(source)
    with_notes = tmp_path / "with-notes"
    run(source, with_notes)
    (with_notes / "notes.txt").write_text("mine")
    nested = tmp_path / "nested"
    run(source, nested)
    (nested / "tokenizer").mkdir()
    for out, said in ((source, "not a model that effllm quantized"), (tmp_path / "file", "file is a file"),
                      (tmp_path / "link", "link is a link to a folder"), (with_notes, "notes.txt"), (nested, "tokenizer")):
        with pytest.raises(UsageError, match=said) as caught:
            run(source, out, options(replace=True))
        assert "--force" not in caught.value.hint
    assert (with_notes / "notes.txt").read_text() == (tmp_path / "file").read_text() == "mine"
    assert (source / "notes.txt").exists() and (tmp_path / "link").is_symlink()


def test_an_empty_folder_is_no_obstacle_and_an_absent_parent_is_named(tmp_path: Path) -> None:
    source = odd_model(tmp_path / "odd")
    (tmp_path / "out").mkdir()
    run(source, tmp_path / "out")
    check_whole(tmp_path / "out", source)
    with pytest.raises(UsageError, match="no folder .*absent") as caught:
        run(source, tmp_path / "absent" / "out")
    assert caught.value.hint == f"mkdir -p {tmp_path / 'absent'}"
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for below in ("file/out", "file/deeper/out", "link/out"):
        name = below.partition("/")[0]
        with pytest.raises(UsageError, match=f"/{name} is a (dangling )?{name}.*, not a folder") as caught:
            run(source, tmp_path / below)
        assert "mkdir" not in caught.value.hint, "what could not work"


def test_a_disk_that_is_too_small_is_seen_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 30, 1 << 30, 1000))
    with pytest.raises(DoesNotFit, match="out needs .*1000 B free"):
        run(FABLE, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_disk_that_fills_while_writing_is_resumable(tmp_path: Path, four_bit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real file system of 2 MiB, where mounting one is allowed."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(disk)], capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system is not allowed here")
    try:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 30, 0, 1 << 30))
        with pytest.raises(DoesNotFit, match="is full: out needs .*iB more") as caught:
            run(FABLE, disk / "out")
        assert "same command" in caught.value.hint and not (disk / "out").exists()
        subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)
        _, said = run(FABLE, disk / "out")
        assert any("earlier run stopped" in line for line in said)
        assert contents(disk / "out") == contents(four_bit)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("room", [0, 1, 9000, 20_000, 25_000, 30_000])
def test_wherever_a_disk_fills_nothing_unwritten_counts_as_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    source = odd_model(tmp_path / "odd")
    run(source, tmp_path / "straight")
    monkeypatch.setattr(convert_stream, "BLOCK_NBYTES", 48 * 4 * 16)  # many blocks to a tensor
    left, real = room, os.pwrite

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        nonlocal left
        left -= len(data)
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data, offset)

    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", pwrite)
        with pytest.raises(DoesNotFit, match="is full"):
            run(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    run(source, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "straight")


def test_an_8_bit_folder_on_a_disk_that_fills_names_it_and_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else takes the room when the plan has been made."""
    straight, made, real = tmp_path / "straight", tmp_path / "out", os.pwrite
    run(FABLE, straight, options("8bit"))
    left = [2_000_000]

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        part = data[: left[0]]
        if not part:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= len(part)
        return real(fd, part, offset)

    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", pwrite)
        with pytest.raises(DoesNotFit, match=f"the disk of {tmp_path} is full: out needs [34].* MiB more"):
            run(FABLE, made, options("8bit"))
    assert not made.exists() and partial_folder(made).is_dir()
    _, said = run(FABLE, made, options("8bit"))
    assert any("earlier run stopped" in line for line in said) and contents(made) == contents(straight)


def test_a_source_that_changes_meanwhile_is_noticed(tmp_path: Path) -> None:
    source = odd_model(tmp_path / "odd")
    running = convert(source, tmp_path / "out", options())
    for item in running:
        if "quantizing" in str(item):
            break
    os.utime(source / "model.safetensors", ns=(1, 1))
    with pytest.raises(EffllmError, match="changed while"):
        list(running)
    assert not (tmp_path / "out").exists()
