"""A GGUF model gives the answers of a folder with the same weights, whatever its row order, types and tensor names."""

import ctypes
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_samples import FABLE, Reader, fable_gguf, write_model
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from effllm import UsageError
from effllm.cli.app import main
from effllm.offload.checkpoint import CheckpointError
from effllm.offload.gguf_header import BLOCKS
from effllm.quant.imports import mxfp4
from effllm.quant.imports.gguf import DECODERS, NATIVE, dequantize
from effllm.quant.weight import Weight
from effllm.runtime.config import read_config
from effllm.runtime.convert import Converted, ConvertOptions, convert, recipe_of
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.events import Notice
from effllm.runtime.gguf.store import open_gguf_store
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.stores.container import read_container
from effllm.runtime.tokenizer import Tokenizer

IDS = [0, 1, 17, 300, 2, 4000, 91, 1234, 5, 77, 901, 3]
SMALL = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3, "tie_word_embeddings": False}
QUICK = {"device": "cpu", "kv": "32bit", "ctx": 64, "threads": 1}


def opened(path: Path, **options: object) -> tuple[Engine, list[str]]:
    items = list(open_engine(path, EngineOptions(**(QUICK | options))))
    return items[-1], [item.text for item in items if isinstance(item, Notice)]


def logits(path: Path, ids: list[int] = IDS, **options: object) -> np.ndarray:
    engine, _ = opened(path, **options)
    try:
        return engine.forward_logits(ids).copy()
    finally:
        engine.close()


def folder_of(meant: dict[str, np.ndarray], source: Path, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A checkpoint folder with these weights, matrices as `dtype`."""
    folder.mkdir()
    save_file({name: torch.from_numpy(np.ascontiguousarray(values)).to(dtype if values.ndim > 1 else torch.float32)
               for name, values in meant.items()}, folder / "model.safetensors")
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    return folder


def small(folder: Path, family: str, **changes: object) -> Path:
    """A random model of a family, norms and biases drawn too."""
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(SMALL | changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", [*DECODERS])
def test_blocks_mean_what_the_gguf_package_says(kind: str) -> None:
    """Bit for bit, on any bytes but MXFP4's scale that is NaN, which the package takes for a number."""
    values, nbytes = BLOCKS[kind]
    raw = np.random.default_rng(3).integers(0, 256, (64, 3 * nbytes), np.uint8)
    if kind == "MXFP4":
        raw.reshape(-1, nbytes)[:, 0] %= mxfp4.NOT_A_NUMBER
    with np.errstate(all="ignore"):
        wanted = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(dequantize(raw, kind, 3 * values), wanted)


def test_every_type_of_the_package_has_our_block_size() -> None:
    sizes = {kind.name: size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert {name: size for name, size in BLOCKS.items()} == {name: sizes[name] for name in BLOCKS}


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_fable_answers_as_the_folder_with_the_same_weights(tmp_path: Path, kind: str) -> None:
    """The same kernels on the same numbers: equal to the last bit."""
    path = tmp_path / "fable.gguf"
    meant = fable_gguf(path, kind)
    dtype = {"F32": torch.float32, "BF16": torch.bfloat16}.get(kind, torch.float16)
    np.testing.assert_array_equal(logits(path), logits(folder_of(meant, FABLE, tmp_path / "folder", dtype)))


@pytest.mark.parametrize("kind", [*NATIVE])
def test_blocks_that_run_as_codes_lose_nothing(tmp_path: Path, kind: str) -> None:
    """The blob that kernels read means what the file means, to the last bit; rows of heads, and a last row block that is not full."""
    wide = {"head_dim": 64, "hidden_size": 256, "intermediate_size": 512} if BLOCKS[kind][0] > 32 else {"head_dim": 24, "hidden_size": 96}
    source = small(tmp_path / "source", "llama", vocab_size=101, **wide)
    meant = write_model(source, tmp_path / "m.gguf", kind)
    with open_gguf_store(tmp_path / "m.gguf", low_bit=True) as store:
        assert len(store.container.tensors) == sum(values.ndim == 2 for values in meant.values())
        assert {stored.spec for stored in store.container.tensors.values()} == {NATIVE[kind]}
        for name, stored in store.container.tensors.items():
            weight = Weight.low_bit(stored.spec, stored.shape, store.read(store.tensors[name]))
            np.testing.assert_array_equal(weight.to_f32(), meant[name])


FIRST = {spec.scheme: kind for kind, spec in reversed(NATIVE.items())}.values()  # of each scheme of codes


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind in FIRST else pytest.mark.slow) for kind in NATIVE])
def test_fable_runs_from_codes(tmp_path: Path, kind: str) -> None:
    """With float32 activations the logits are those of the same weights as floats; int8 activations move them a little."""
    meant = fable_gguf(path := tmp_path / "fable.gguf", kind)
    wanted = logits(folder_of(meant, FABLE, tmp_path / "folder"), IDS * 2)
    for exact, bound in ((True, 2e-5), (False, 0.05)):
        assert np.abs(logits(path, IDS * 2, exact=exact) - wanted).max() < bound * np.abs(wanted).max()
    assert np.abs(logits(path, IDS[:1]) - wanted[:1]).max() < 0.05 * np.abs(wanted).max()
    engine, notices = opened(path)
    assert any(kind in text and "repacked for the kernels" in text for text in notices)
    grown = NATIVE[kind].nbytes((1 << 10, 1 << 10)) / (1 << 20) * BLOCKS[kind][0] / BLOCKS[kind][1]
    engine.close()
    assert engine.model.nbytes < 1.05 * path.stat().st_size * grown


@pytest.mark.peer
@pytest.mark.slow
def test_a_file_that_llama_cpp_quantized_answers_as_its_widened_weights(tmp_path: Path) -> None:
    """Q4_K_M is Q4_K and Q6_K. The likeliest tokens are those of the same weights as floats, where no two are as likely; sizes exact."""
    peer = pytest.importorskip("llama_cpp")
    fable_gguf(tmp_path / "f16.gguf", "F16")
    params = peer.llama_model_quantize_default_params()
    params.ftype, params.nthread = peer.LLAMA_FTYPE_MOSTLY_Q4_K_M, 2
    path = tmp_path / "m.gguf"
    assert peer.llama_model_quantize(str(tmp_path / "f16.gguf").encode(), str(path).encode(), ctypes.byref(params)) == 0
    tensors = {tensor.name: tensor for tensor in Reader(path).tensors}
    kinds = {tensor.tensor_type.name for tensor in tensors.values()}
    assert {"Q4_K", "Q6_K"} <= kinds <= {"Q4_K", "Q6_K", "F32"}
    with open_gguf_store(path, low_bit=True) as store, open_gguf_store(path, "f32") as wide:
        assert len(store.container.tensors) == 43
        for name, stored in store.container.tensors.items():
            weight = Weight.low_bit(stored.spec, stored.shape, store.read(store.tensors[name]))
            np.testing.assert_array_equal(weight.to_f32(), wide.read(wide.tensors[name]).view(np.float32).reshape(stored.shape))
        held = sum(info.nbytes for info in store.tensors.values())
        assert held < 1.02 * sum(int(tensor.n_bytes) for tensor in tensors.values())
    engine, _ = opened(path)
    assert engine.model.nbytes == held
    engine.close()
    found = {exact: logits(path, IDS * 2, exact=exact) for exact in (True, False)}
    assert np.abs(found[True] - found[False]).max() < 0.05 * np.abs(found[True]).max()
    with open_gguf_store(path, "f32") as wide:
        meant = {name: wide.read(info).view(np.float32).reshape(info.shape) for name, info in wide.tensors.items()}
    wanted = logits(folder_of(meant, FABLE, tmp_path / "folder"), IDS * 2)
    assert np.abs(found[True] - wanted).max() < 2e-5 * np.abs(wanted).max()
    clear = np.diff(np.sort(wanted, axis=1)[:, -2:])[:, 0] > 0.05 * np.abs(wanted).max()
    assert clear.sum() >= 5 and np.array_equal(found[False].argmax(1)[clear], wanted.argmax(1)[clear])


INFINITY = b"\x00\x7c"


@pytest.mark.parametrize(("kind", "at", "wrong"), [("Q4_0", 18, INFINITY), ("Q4_1", 20, INFINITY), ("Q4_K", 144 + 2, INFINITY),
                                                   ("Q6_K", 208, INFINITY), ("MXFP4", 17, b"\xff"), ("MXFP4", 17, b"\xfe\x77")])
def test_a_scale_that_is_not_finite_is_named(tmp_path: Path, kind: str, at: int, wrong: bytes) -> None:
    path = tmp_path / "m.gguf"
    fable_gguf(path, kind)
    with open_gguf_store(path, low_bit=True) as store:
        info = store.tensors["model.layers.1.mlp.up_proj.weight"]
    raw = bytearray(path.read_bytes())
    raw[info.offset + at : info.offset + at + len(wrong)] = wrong
    path.write_bytes(raw)
    with open_gguf_store(path) as store, pytest.raises(CheckpointError, match="blk.1.ffn_up.weight"):
        store.read(store.tensors[info.name])
    if kind != "MXFP4" or len(wrong) == 1:  # the other's scale is a number, its products with the larger codes are none
        with pytest.raises(CheckpointError, match="blk.1.ffn_up.weight"):
            opened(path)


@pytest.mark.parametrize(("family", "arch", "changes"), [
    ("llama", "llama", {}), ("llama", "llama", {"head_dim": 32, "tie_word_embeddings": True}), ("qwen2", "qwen2", {}),
    ("qwen3", "qwen3", {"head_dim": 32})])
def test_families(tmp_path: Path, family: str, arch: str, changes: dict[str, object]) -> None:
    source, path = small(tmp_path / "source", family, **changes), tmp_path / "model.gguf"
    write_model(source, path, "F32", arch)
    assert read_config(path).family == family
    ids = [token % 96 for token in IDS]
    np.testing.assert_array_equal(logits(path, ids), logits(source, ids))


def gemma(base: float, caps: bool = False):
    """What files of these families state beside the usual keys."""
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_freq_base(base)
        writer.add_sliding_window(8)
        if caps:
            writer.add_attn_logit_softcapping(50.0)
            writer.add_final_logit_softcapping(30.0)
    return change


@pytest.mark.parametrize(("family", "arch", "changes", "stated"), [
    ("gemma2", "gemma2", {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
     gemma(10_000.0, caps=True)),
    ("gemma3_text", "gemma3", {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 32, "num_hidden_layers": 6,
                               "tie_word_embeddings": True}, gemma(1_000_000.0)),
    ("phi3", "phi3", {"pad_token_id": 0}, None), ("phi3", "phi3", {"pad_token_id": 0}, lambda made: made.add_sliding_window(0)),  # Phi 4's
])
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_families_whose_files_differ_more(tmp_path: Path, family: str, arch: str, changes: dict[str, object], stated: object,
                                          kind: str) -> None:
    """One is taken off the norms, tensors in one are parted, also those that run from codes."""
    source, path = small(tmp_path / "source", family, **changes), tmp_path / "model.gguf"
    meant = write_model(source, path, kind, arch, change=stated)
    assert read_config(path).family == family
    if arch.startswith("gemma"):
        meant = {name: values - np.float32(1) if "norm" in name else values for name, values in meant.items()}
    ids = [token % 96 for token in IDS]
    wanted = logits(folder_of(meant, source, tmp_path / "folder"), ids)
    got = logits(path, ids, exact=kind == "Q8_0")
    assert np.abs(got - wanted).max() < 5e-5 * np.abs(wanted).max()


def test_a_window_makes_a_mistral(tmp_path: Path) -> None:
    source, path = small(tmp_path / "source", "mistral", sliding_window=8), tmp_path / "model.gguf"
    write_model(source, path, "F32", change=lambda writer: writer.add_sliding_window(8))
    assert read_config(path).windows == (8, 8)
    ids = [token % 96 for token in IDS]
    np.testing.assert_array_equal(logits(path, ids), logits(source, ids))


def test_rotary_divisors_and_scaling(tmp_path: Path) -> None:
    """Llama 3.1's stretch travels as a tensor of divisors; linear and yarn as keys."""
    rope = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64}
    source = small(tmp_path / "source", "llama", rope_parameters=rope, max_position_embeddings=512)
    plain = 10_000.0 ** (-np.arange(0, 16, 2) / 16)
    wave = 2 * np.pi / plain
    smooth = (64 / wave - 1.0) / 3.0
    divisors = np.where(wave > 64, 8.0, np.where(wave < 16, 1.0, 1 / ((1 - smooth) / 8 + smooth)))
    path = tmp_path / "model.gguf"
    write_model(source, path, "F32", change=lambda writer: writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32)))
    ids = [token % 96 for token in IDS] * 2
    np.testing.assert_allclose(logits(path, ids), logits(source, ids), atol=2e-4)

    def stretched(kind: gguf.RopeScalingType) -> Path:
        def change(writer: gguf.GGUFWriter) -> None:
            writer.add_rope_scaling_type(kind)
            writer.add_rope_scaling_factor(4.0)
            writer.add_rope_scaling_orig_ctx_len(128)

        write_model(source, tmp_path / f"{kind}.gguf", "F32", change=change)
        return tmp_path / f"{kind}.gguf"

    linear, yarn = (read_config(stretched(kind)).rope for kind in (gguf.RopeScalingType.LINEAR, gguf.RopeScalingType.YARN))
    assert (linear.kind, linear.params["factor"]) == ("linear", 4.0)
    assert (yarn.kind, yarn.params["factor"], yarn.params["original_max_position_embeddings"]) == ("yarn", 4.0, 128)


def test_rows_of_any_range_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    """A range may begin and end inside a head, whose rows lie elsewhere in the file."""
    meant = fable_gguf(tmp_path / "m.gguf", "Q8_0")
    with open_gguf_store(tmp_path / "m.gguf", "f32") as store:
        for name in ("model.layers.3.self_attn.k_proj.weight", "model.layers.0.mlp.down_proj.weight", "model.norm.weight"):
            info, values = store.tensors[name], meant[name]
            for begin, end in ((0, 1), (30, 100), (63, 65), (127, 128), (0, len(values)), (5, 5)):
                begin, end = min(begin, len(values)), min(end, len(values))
                np.testing.assert_array_equal(store.read(info, begin, end).view(np.float32), values[begin:end].reshape(-1))


def test_what_is_widened_is_reported_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(NATIVE, "Q5_1")  # as one of which kernels know nothing
    fable_gguf(tmp_path / "m.gguf", "Q5_1")
    engine, notices = opened(tmp_path / "m.gguf")
    try:
        assert sum("43 Q5_1" in text and "f16" in text for text in notices) == 1
        assert engine.model.nbytes == sum(info.nbytes for info in engine.prepared.store.tensors.values())
    finally:
        engine.close()
    fable_gguf(tmp_path / "raw.gguf", "F16")
    assert not any("widened" in text for text in prepare(tmp_path / "raw.gguf", EngineOptions(**QUICK)).notices)
    with pytest.raises(UsageError, match="--load mmap"):
        prepare(tmp_path / "raw.gguf", EngineOptions(**QUICK, load="mmap"))


def test_a_file_is_quantized_into_a_folder_that_runs_alone(tmp_path: Path) -> None:
    fable_gguf(tmp_path / "m.gguf", "F16")
    *_, made = convert(tmp_path / "m.gguf", tmp_path / "out", ConvertOptions(recipe_of("8bit", (), "rtn"), "8bit", threads=1))
    assert isinstance(made, Converted) and read_container(tmp_path / "out").spec_text == "8bit"
    (tmp_path / "m.gguf").unlink()
    own, folder = (logits(path) for path in (FABLE, tmp_path / "out"))
    assert np.abs(own - folder).max() < 0.1 * np.abs(own).max()
    text = "Once upon a time, the fox said: 'I am 12 years old.'"
    tokenizers = [Tokenizer.load(path, read_config(path)) for path in (FABLE, tmp_path / "out")]
    assert tokenizers[0].encode(text) == tokenizers[1].encode(text)
    assert tokenizers[0].stop_ids >= tokenizers[1].stop_ids >= {4}
    messages = [{"role": "user", "content": "Hello"}]
    assert tokenizers[0].render_chat(messages) == tokenizers[1].render_chat(messages)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"


def test_the_tokenizer_of_the_file(tmp_path: Path) -> None:
    fable_gguf(tmp_path / "m.gguf")
    config = read_config(tmp_path / "m.gguf")
    own, other = (Tokenizer.load(path, config) for path in (FABLE, tmp_path / "m.gguf"))
    text = "The king had 3 sons,\n\nand   the eldest — well … was <|end|> 12½ years old. Äpfel 𝒳 123456"
    assert own.encode(text) == other.encode(text)
    ids = own.encode(text)
    assert own.decode(ids) == other.decode(ids)
    assert own.special_tokens["eos_token"] == other.special_tokens["eos_token"]
    assert own.template.source == other.template.source
    assert other.stop_ids >= {4}


@pytest.mark.slow
def test_what_other_commands_say_of_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """show, plan and eval take it; verify and rm decline in one line."""
    fable_gguf(tmp_path / "m.gguf", "Q4_0")
    path, text = str(tmp_path / "m.gguf"), tmp_path / "text.txt"
    text.write_text("The king had three sons, and the youngest was called Hans. " * 4)
    assert main(["show", path, "--json"]) == 0
    shown = json.loads(capfd.readouterr().out)
    assert shown["stored"] == ["F32", "block4:32"] and shown["chat_template"] and shown["quantized"]["spec"] == "Q4_0"
    assert main(["show", path]) == 0 and "stored as F32, Q4_0, " in capfd.readouterr().out
    for words in (["plan", path], ["eval", "ppl", path, "--text", str(text), "-c", "32"], ["run", path, "Hello", "-n", "3"]):
        assert main(words) == 0
        assert capfd.readouterr().out
    for words, said in ((["verify", path], "no checksums"), (["rm", path, "-y"], "does not manage"),
                        (["run", path, "x", "--load", "mmap"], "--load mmap")):
        assert main(words) == 2
        error = capfd.readouterr().err
        assert said in error and "Traceback" not in error
    assert (tmp_path / "m.gguf").exists()
    (tmp_path / "broken.gguf").write_bytes((tmp_path / "m.gguf").read_bytes()[:5000])
    assert main(["run", str(tmp_path / "broken.gguf"), "x"]) == 1
    error = capfd.readouterr().err
    assert "broken.gguf" in error and "Traceback" not in error and len(error.splitlines()) <= 2
