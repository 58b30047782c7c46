"""Export in the compressed-tensors layout, unpacked by the layout's own rules: words, groups, scales, and the description."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conversions import lines_of
from gguf_samples import FABLE, fable_gguf, weights
from hypothesis import given
from hypothesis import strategies as st
from test_imported import written

from effllm import DoesNotFit, UsageError
from effllm.cli.app import main
from effllm.offload.checkpoint import TensorStore
from effllm.offload.folder_writer import JOURNAL, partial_folder
from effllm.quant.imports.compressed_tensors import pack_words, quantize_groups, unpack_words
from effllm.quant.weight import to_f32
from effllm.runtime.conversion.compressed_tensors import CompressedFolder, export_compressed
from effllm.runtime.convert import ConvertOptions, convert, recipe_of
from effllm.runtime.events import Notice, Progress
from effllm.runtime.gguf.export import export_gguf


def exported(out: Path, kind: str) -> CompressedFolder:
    *_, made = export_compressed(FABLE, out, kind)
    return made


@given(st.sampled_from([4, 8]), st.integers(1, 9), st.integers(1, 50), st.integers(0, 2**32 - 1))
def test_words_there_and_back(bits: int, rows: int, width: int, seed: int) -> None:
    low = 1 << (bits - 1)
    values = np.random.default_rng(seed).integers(-low, low, (rows, width)).astype(np.int8)
    words = pack_words(values, bits)
    assert words.dtype == np.int32 and words.shape == (rows, -(-width * bits // 32))
    np.testing.assert_array_equal(unpack_words(words, bits, width), values)


def test_words_by_hand() -> None:
    """The first value in the lowest bits, eight above zero."""
    assert pack_words(np.array([[-8, -7, 0, 7]], np.int8), 4).view(np.uint32)[0, 0] == 0xF810
    assert pack_words(np.array([[-128, 0, 127, 1]], np.int8), 8).view(np.uint32)[0, 0] == 0x81FF8000


def test_scales_of_groups() -> None:
    values = np.random.default_rng(0).standard_normal((6, 256)).astype(np.float32)
    values[2, :128] = 0
    codes, scales = quantize_groups(values, 4, 128)
    assert codes.min() >= -8 and codes.max() <= 7 and scales.shape == (6, 2) and scales[2, 0] == 0
    assert np.array_equal(to_f32((scales.view(np.uint32) >> 16).astype(np.uint16), "bf16"), scales)
    error = np.abs(codes.reshape(6, 2, 128) * scales[..., None] - values.reshape(6, 2, 128))
    plain = np.abs(values.reshape(6, 2, 128)).max(-1) / 7
    assert (np.square(error).sum(-1) <= np.square(plain / 2 * np.sqrt(128)) + 1e-9).all()


@pytest.mark.parametrize(("kind", "bits", "bound"), [("INT4", 4, 0.15), ("INT8", 8, 0.012)])
def test_fable_unpacked_by_the_layout(tmp_path: Path, kind: str, bits: int, bound: float) -> None:
    made = exported(tmp_path / "out", kind)
    source = weights(FABLE)
    described = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert described["quant_method"] == "compressed-tensors" and described["format"] == "pack-quantized"
    assert described["config_groups"]["group_0"]["weights"]["num_bits"] == bits
    with TensorStore.open(tmp_path / "out") as store:
        assert made.nbytes == (tmp_path / "out" / "model.safetensors").stat().st_size and made.quantized == 6 * 7
        for name, values in source.items():
            if "proj" not in name:
                assert store.tensors[name].shape == values.shape
                continue
            base = name.removesuffix("weight")
            words, scale, shape = (store.tensors[f"{base}weight_{part}"] for part in ("packed", "scale", "shape"))
            assert (words.dtype, scale.dtype, shape.dtype) == ("I32", "BF16", "I64")
            assert store.read(shape).view(np.int64).tolist() == list(values.shape)
            codes = unpack_words(store.read(words).view(np.int32).reshape(words.shape), bits, values.shape[1])
            scales = to_f32(store.read(scale).view(np.uint16), "bf16").reshape(scale.shape)
            back = codes * np.repeat(scales, 128, axis=1)
            assert np.sqrt(np.square(back - values).mean() / np.square(values).mean()) < bound
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= names and not list(tmp_path.glob(".*"))


def begun(source: Path, out: Path) -> None:
    """An export that is left when a quarter of it is done."""
    running = export_compressed(source, out, "INT4")
    for item in running:
        if isinstance(item, Progress) and item.done > item.total // 4:
            break
    running.close()
    assert not out.exists()


def test_an_export_continues_and_never_over_another_source(tmp_path: Path) -> None:
    """Other weights of the same shapes in the same place: half of each would be a model that nobody made."""
    source = tmp_path / "model"
    shutil.copytree(FABLE, source)
    begun(source, tmp_path / "same")
    said = [item.text for item in export_compressed(source, tmp_path / "same", "INT4") if isinstance(item, Notice)]
    assert said == ["resuming where an earlier run stopped"]
    begun(source, tmp_path / "out")
    raw = (source / "model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    (source / "model.safetensors").write_bytes(raw[:begin] + (np.frombuffer(raw[begin:], np.uint16) ^ (1 << 15)).tobytes())  # every sign
    said = [item.text for item in export_compressed(source, tmp_path / "out", "INT4") if isinstance(item, Notice)]
    assert len(said) == 1 and "starting over" in said[0]
    *_, fresh = export_compressed(source, tmp_path / "fresh", "INT4")
    made = (fresh.folder / "model.safetensors").read_bytes()
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == made != (tmp_path / "same" / "model.safetensors").read_bytes()


def test_a_disk_that_is_too_small_is_seen_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 30, 1 << 30, 1000))
    with pytest.raises(DoesNotFit, match="out needs .*1000 B free"):
        exported(tmp_path / "out", "INT4")
    assert not partial_folder(tmp_path / "out").exists()


def test_ctrl_c_says_how_to_continue(tmp_path: Path) -> None:
    """The signal comes when the journal shows that something is done; a run that was faster than that has nothing to go on with."""
    words = ["export", str(FABLE), "--format", "compressed-tensors", "-o", str(out := tmp_path / "out")]
    with subprocess.Popen([sys.executable, "-P", "-m", "effllm", *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                          preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)) as running:  # ignored in a background job
        journal = partial_folder(out) / JOURNAL
        while running.poll() is None and lines_of(journal) < 4:
            time.sleep(0.001)
        running.send_signal(signal.SIGINT)
        said = running.communicate(timeout=60)[1]
    assert running.returncode in (0, 130)
    assert "Traceback" not in said and out.exists() != ("the same command continues" in said)
    if not out.exists():
        assert main(words) == 0
    assert (out / "model.safetensors").exists() and not partial_folder(out).exists()


def test_the_command_and_what_it_refuses(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["export", "fable", "--format", "compressed-tensors", "-o", str(tmp_path / "out")]
    assert main([*words, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["quantized_tensors"] == 42
    assert main(words) == 2 and "exists" in capfd.readouterr().err
    with pytest.raises(UsageError, match="INT3"):
        exported(tmp_path / "other", "INT3")


@pytest.mark.parametrize("kind", ("Q8_0", "Q4_1", "awq", "fp8 rows", "effllm"))
def test_what_was_rounded_before_is_not_rounded_again_without_a_word(kind: str, tmp_path: Path) -> None:
    """Whoever did it, and whether or not it runs from those codes: integers are refused, a GGUF file says so."""
    source = tmp_path / ("m.gguf" if kind.startswith("Q") else "model")
    if kind == "effllm":
        list(convert(FABLE, source, ConvertOptions(recipe_of("4bit", (), "rtn"), "4bit")))
    elif source.suffix:
        fable_gguf(source, kind)
    else:
        written(source, kind)
    with pytest.raises(UsageError, match="is quantized already") as refused:
        list(export_compressed(source, tmp_path / "out", "INT4"))
    assert refused.value.hint == "export the original checkpoint" and not (tmp_path / "out").exists()
    said = [item.text for item in export_gguf(source, tmp_path / "out.gguf", "Q8_0", "a name") if isinstance(item, Notice)]
    assert "the source is quantized already: its errors and those of the new type add up" in said
