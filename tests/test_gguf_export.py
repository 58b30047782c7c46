"""GGUF export: the bytes that the format's own package writes, files that answer as their source does, atomic writes."""

import json
import os
import shutil
from dataclasses import replace as changed
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_samples import FABLE, Reader, separated, weights
from safetensors.torch import load_file, save_file
from saved_tokenizers import with_words_of_fable
from transformers import AutoConfig, AutoModelForCausalLM

from effllm import EffllmError, UsageError
from effllm.cli.app import main
from effllm.quant.imports.gguf import ENCODERS, quantize
from effllm.runtime.config import read_config
from effllm.runtime.conversion.bundle_ffn import bundle
from effllm.runtime.convert import ConvertOptions, convert, recipe_of
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.events import Notice
from effllm.runtime.gguf.export import Exported, export_gguf
from effllm.runtime.gguf.tokenizer import tokenizer_files
from effllm.runtime.gguf.tokenizer_export import tokenizer_metadata
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.sampler import Sampler, SamplerSettings
from effllm.runtime.sampling.generation_config import read_generation_config
from effllm.runtime.source import is_low_bit
from effllm.runtime.tokenizer import Tokenizer

VOCABULARIES = sorted(path for parent in Path(__file__).resolve().parents for path in (parent / "shared" / "vocabs").glob("*.gguf"))
PROMPTS = ("Once upon a time", "The king said to his daughter:", "There was a fox who", "In a dark forest", "The old woman",
           "Tell me a story about the sea.", "A poor miller had three sons", "The wolf came to the door", "When the sun rose", "Far away")
IDS = [0, 1, 17, 300, 2, 4000, 91, 1234, 5, 77, 901, 3]


def exported(source: Path, out: Path, kind: str = "F16", **more: object) -> tuple[Exported, list[str]]:
    items = list(export_gguf(source, out, kind, "a name", **more))
    return items[-1], [item.text for item in items if isinstance(item, Notice)]


def opened(path: Path, kv: str = "32bit") -> Engine:
    *_, engine = open_engine(path, EngineOptions(device="cpu", kv=kv, ctx=256, threads=1, exact=not is_low_bit(path)))
    return engine


def logits(path: Path, ids: list[int] = IDS) -> np.ndarray:
    engine = opened(path)
    try:
        return engine.forward_logits(ids).copy()
    finally:
        engine.close()


def test_the_recommended_sampling_goes_along(tmp_path: Path) -> None:
    """Without it a file answers otherwise than the folder that it was made of, at the same flags."""
    folder = tmp_path / "model"
    shutil.copytree(FABLE, folder)
    wanted = {"temperature": 0.7, "top_k": 30, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3, "penalty_last_n": 64}
    for given, kept in ((wanted, wanted), ({"do_sample": False, "top_k": -1}, {"temperature": 0.0, "top_k": 0}), ({}, {}),
                        ({"penalty_last_n": -1}, {"penalty_last_n": -1}), ({"penalty_last_n": 0}, {"penalty_last_n": 0}),
                        ({"top_k": 10**20, "temperature": 1e300}, {"top_k": 2**31 - 1}),
                        ({"top_k": "many", "temperature": 0.5, "seed": 3}, {"temperature": 0.5})):
        (folder / "generation_config.json").write_text(json.dumps(given))
        _, said = exported(folder, tmp_path / "m.gguf", replace=True)
        found, _ = read_generation_config(tmp_path / "m.gguf")
        assert found == pytest.approx(kept), given
        assert any("top_k must be a whole number" in text for text in said) == (given.get("top_k") == "many")
        exported(tmp_path / "m.gguf", tmp_path / "again.gguf", replace=True)
        assert read_generation_config(tmp_path / "again.gguf")[0] == pytest.approx(kept)


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    """A folder out of an old archive, named in another code than UTF-8: internal error."""
    *_, made = export_gguf(FABLE, tmp_path / "m.gguf", "Q8_0", os.fsdecode(b"caf\xe9"))
    assert Reader(made.path).fields["general.name"].contents() == "caf?"


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0"])
def test_weights_that_a_type_cannot_hold_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    """The scale of their block was infinite, and the file no model."""
    source, name = tmp_path / "model", "model.layers.2.mlp.up_proj.weight"
    shutil.copytree(FABLE, source)
    tensors = load_file(source / "model.safetensors")
    tensors[name] = tensors[name].float()
    tensors[name][3, 5] = 1e7
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(EffllmError, match=f"holds weights that {kind} cannot"):
        exported(source, tmp_path / "m.gguf", kind)
    assert not (tmp_path / "m.gguf").exists()
    exported(source, tmp_path / "m.gguf", "BF16")
    (written,) = (tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors if tensor.name == "blk.2.ffn_up.weight")
    assert gguf.quants.dequantize(written.data, written.tensor_type)[3, 5] == pytest.approx(1e7, rel=2**-8)


@pytest.mark.parametrize("kind", [*ENCODERS])
def test_blocks_are_those_of_the_gguf_package(kind: str) -> None:
    """Byte for byte, with ties, zeros, and groups of one sign."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal((200, 96)).astype(np.float32) * 10.0 ** rng.integers(-6, 4, (200, 1))
    values[3] = 0
    values[4] = np.abs(values[4])
    values[5, :32] = np.arange(32) - 16
    values[6, 32:64] = np.float32(0.5) * np.arange(32)
    values = values.astype(np.float32)
    np.testing.assert_array_equal(quantize(values, kind), gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind]))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_fable_as_a_file(tmp_path: Path, kind: str) -> None:
    made, notices = exported(FABLE, tmp_path / "fable.gguf", kind)
    assert made.nbytes == (tmp_path / "fable.gguf").stat().st_size
    reader, package = Reader(tmp_path / "fable.gguf"), gguf.GGUFReader(tmp_path / "fable.gguf")
    fields, theirs = ([(name, each.types, each.contents()) for name, each in of.fields.items()] for of in (reader, package))
    assert fields == theirs
    assert [(each.name, each.data_offset) for each in reader.tensors] == [(each.name, each.data_offset) for each in package.tensors]
    assert reader.fields["general.architecture"].contents() == "llama"
    assert reader.fields["general.file_type"].contents() == {"F16": 1, "BF16": 32, "Q8_0": 7, "Q4_0": 2}[kind]
    assert reader.fields["tokenizer.ggml.pre"].contents() == "smollm"
    source = weights(FABLE)
    for tensor in reader.tensors:
        if tensor.name in ("blk.2.attn_k.weight", "blk.0.ffn_down.weight"):
            own = source["model.layers.2.self_attn.k_proj.weight" if "attn_k" in tensor.name else "model.layers.0.mlp.down_proj.weight"]
            back = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            back = separated(back, 2) if "attn_k" in tensor.name else back
            bound = {"F16": 1e-3, "BF16": 0.0, "Q8_0": 1 / 127, "Q4_0": 1 / 7.9}[kind] * np.abs(own).max()
            assert back.shape == own.shape and np.abs(back - own).max() <= bound
    assert ("Q8_0" in " ".join(notices)) == (kind == "Q4_0")
    worst = np.abs(logits(tmp_path / "fable.gguf") - logits(FABLE)).max() / np.abs(logits(FABLE)).max()
    assert worst <= {"F16": 1e-3, "BF16": 0.0, "Q8_0": 0.05, "Q4_0": 0.5}[kind], "fable's weights are bf16"


def test_the_tokenizer_travels(tmp_path: Path) -> None:
    exported(FABLE, tmp_path / "fable.gguf")
    config = read_config(tmp_path / "fable.gguf")
    own, other = (Tokenizer.load(path, config) for path in (FABLE, tmp_path / "fable.gguf"))
    text = "The 3 kings' 12,345 horses — ünïcode 中文 🙂\n\n  indented <|end|><|user|>"
    assert own.encode(text) == other.encode(text) and own.stop_ids == other.stop_ids and own.special_tokens.items() >= {
        "eos_token": other.special_tokens["eos_token"]}.items()
    messages = [{"role": "user", "content": "Hello"}]
    assert own.encode_chat(messages) == other.encode_chat(messages)


@pytest.mark.parametrize(("family", "changes"), [
    ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0,
                                   "high_freq_factor": 4.0, "original_max_position_embeddings": 64}}),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}}),
    ("qwen2", {}), ("qwen3", {"head_dim": 32}), ("mistral", {"sliding_window": 9, "rope_parameters": {
        "rope_type": "linear", "rope_theta": 5_000.0, "factor": 2.0}})])
def test_families(tmp_path: Path, family: str, changes: dict[str, object]) -> None:
    """What is written is read back as the same model."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(sizes | changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter) if parameter.ndim == 1 else 0)
    model.half().float().save_pretrained(tmp_path / "source")
    with_words_of_fable(tmp_path / "source")
    _, notices = exported(tmp_path / "source", tmp_path / "m.gguf")
    assert any("sliding window" in text for text in notices) == (family == "mistral")
    np.testing.assert_allclose(logits(tmp_path / "m.gguf"), logits(tmp_path / "source"), atol=3e-4)


@pytest.mark.slow
@pytest.mark.skipif(not VOCABULARIES, reason="no vocabularies beside this checkout")
@pytest.mark.parametrize("path", VOCABULARIES, ids=lambda path: path.stem)
def test_published_vocabularies_there_and_back(tmp_path: Path, path: Path) -> None:
    """GGUF -> tokenizer.json -> GGUF keys: the same tokens, and the same ids on texts (which the export checks itself)."""
    for name, text in tokenizer_files(path).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    config = changed(read_config(FABLE), vocab_size=40_000 if path.stem != "gpt-2" else 50_257, bos_token_id=None, eos_token_ids=())
    keys = tokenizer_metadata(tmp_path, Tokenizer.load(tmp_path, config), config.vocab_size)
    own = Reader(path).fields
    tokens = own["tokenizer.ggml.tokens"].contents()
    assert keys["tokenizer.ggml.tokens"][: len(tokens)] == tokens and keys["tokenizer.ggml.model"] == own["tokenizer.ggml.model"].contents()
    assert keys["tokenizer.ggml.eos_token_id"] == own["tokenizer.ggml.eos_token_id"].contents()
    if "merges" in " ".join(keys):
        assert keys["tokenizer.ggml.merges"] == own["tokenizer.ggml.merges"].contents()
        assert keys["tokenizer.ggml.pre"] == own["tokenizer.ggml.pre"].contents()


def test_quantized_sources(tmp_path: Path) -> None:
    """Our own low-bit folder, and a GGUF file."""
    *_, _ = convert(FABLE, tmp_path / "low", ConvertOptions(recipe_of("8bit", (), "rtn"), "8bit", threads=1))
    _, notices = exported(tmp_path / "low", tmp_path / "a.gguf")
    assert any("errors" in text for text in notices)
    source = logits(tmp_path / "low")
    assert np.abs(logits(tmp_path / "a.gguf") - source).max() < 0.05 * np.abs(source).max()  # activations are exact here
    exported(tmp_path / "a.gguf", tmp_path / "b.gguf")
    np.testing.assert_array_equal(logits(tmp_path / "b.gguf"), logits(tmp_path / "a.gguf"))


def test_nothing_is_overwritten_or_left_half(tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    running = export_gguf(FABLE, out, "F16", "x")
    for _ in range(4):
        next(running)
    running.close()
    assert list(tmp_path.iterdir()) == []
    exported(FABLE, out)
    with pytest.raises(UsageError, match="exists"):
        exported(FABLE, out)
    exported(FABLE, out, replace=True)
    for wrong, named in ((tmp_path / "m.bin", ".gguf"), (tmp_path / "absent" / "m.gguf", "no folder"), (out / "m.gguf", "is a file, not")):
        with pytest.raises(UsageError, match=named):
            exported(FABLE, wrong)
    with pytest.raises(UsageError, match="Q3_K"):
        exported(FABLE, tmp_path / "n.gguf", "Q3_K")
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in FABLE.iterdir():
        (damaged / file.name).write_bytes(file.read_bytes())
    raw = bytearray((damaged / "model.safetensors").read_bytes())
    raw[-4096:] = b"\xff\x7f" * 2048  # NaN as bfloat16
    (damaged / "model.safetensors").write_bytes(raw)
    with pytest.raises(EffllmError, match="NaN"):
        exported(damaged, tmp_path / "n.gguf")
    assert not (tmp_path / "n.gguf").exists() and not list(tmp_path.glob(".*"))


def test_a_model_is_never_overwritten_with_itself(tmp_path: Path) -> None:
    """Whatever --force says: an export loses something, and the original would be gone."""
    source, link = tmp_path / "m.gguf", tmp_path / "link.gguf"
    exported(FABLE, source, "Q8_0")
    before = source.read_bytes()
    link.symlink_to(source)
    for model, out in ((source, source), (source, tmp_path / "." / "m.gguf"), (link, source), (source, link)):
        for replace in (False, True):
            with pytest.raises(UsageError, match="belongs to the model being exported"):
                exported(model, out, "Q4_0", replace=replace)
    assert source.read_bytes() == before


def test_what_lies_in_the_way_is_reported(tmp_path: Path) -> None:
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "other.gguf").write_text("mine")
    (tmp_path / "link.gguf").symlink_to(tmp_path / "other.gguf")
    (tmp_path / "nowhere.gguf").symlink_to(tmp_path / "absent")
    for name, said in (("folder", "is a folder"), ("link", "is a link to a file"), ("nowhere", "is a dangling link")):
        for replace in (False, True):
            with pytest.raises(UsageError, match=said) as refused:
                exported(FABLE, tmp_path / f"{name}.gguf", replace=replace)
            assert "--force" not in refused.value.hint
    with pytest.raises(UsageError, match="exists") as refused:
        exported(FABLE, tmp_path / "other.gguf")
    assert "--force replaces it" in refused.value.hint and (tmp_path / "other.gguf").read_text() == "mine"


def test_neurons_that_lie_one_by_one_are_refused(tmp_path: Path) -> None:
    list(bundle(FABLE, tmp_path / "bundles", gate_sparsity=0.5))
    with pytest.raises(UsageError, match="bundled neurons") as refused:
        list(export_gguf(tmp_path / "bundles", tmp_path / "out.gguf", "F16", "name"))
    assert "original" in refused.value.hint and not (tmp_path / "out.gguf").exists()


def test_what_gguf_cannot_say_is_refused(tmp_path: Path) -> None:
    for file in FABLE.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    raw = json.loads((tmp_path / "config.json").read_text())
    for change, named in (({"hidden_act": "gelu"}, "gelu"), ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic")):
        (tmp_path / "config.json").write_text(json.dumps(raw | change))
        with pytest.raises(EffllmError, match=named):
            exported(tmp_path, tmp_path / "m.gguf")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": "\\w+"}, "behavior": "Isolated", "invert": False}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(EffllmError, match="has a pre-tokenizer"):
        exported(tmp_path, tmp_path / "m.gguf")


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "fable", "-o", str(tmp_path / "m.gguf"), "--type", "q8_0", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["types"] == {"Q8_0": 43, "F32": 13}
    assert main(["export", "fable", "-o", str(tmp_path / "m.gguf")]) == 2
    assert "exists" in capfd.readouterr().err


@pytest.fixture(scope="module")
def peer() -> object:
    return pytest.importorskip("llama_cpp")


def greedy(path: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    engine, answers = opened(path, "32bit"), []
    try:
        for ids in prompts:
            engine.reset()
            for _ in engine.prefill(ids):
                continue
            sampler = Sampler(SamplerSettings(temperature=0.0), engine.config.vocab_size)
            answers.append([step.token for step in engine.generate(sampler, count, frozenset())])
    finally:
        engine.close()
    return answers


@pytest.mark.peer
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "least"), [("F16", 10), ("BF16", 10), ("Q8_0", 9), ("Q4_0", 9)])
def test_llama_cpp_answers_the_same(tmp_path: Path, peer: object, kind: str, least: int) -> None:
    """Its tokenizer cuts the prompts as ours does, and its greedy answers are ours; where one parts, two tokens were as likely.

    The file is what is compared, so our cache adds no rounding. Both programs round activations to 8 bits, each by its own rule, by which
    logits differ by 0.1, so how many part is a matter of ties."""
    path = tmp_path / "fable.gguf"
    exported(FABLE, path, kind)
    tokenizer = Tokenizer.load(FABLE, read_config(FABLE))
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    model = peer.Llama(str(path), n_ctx=256, n_threads=2, verbose=False)
    theirs = []
    for text, ids in zip(PROMPTS, prompts):
        assert model.tokenize(text.encode(), add_bos=False, special=True) == ids
        model.reset()
        answer = []
        for token in model.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0):
            answer.append(token)
            if len(answer) == 64:
                break
        theirs.append(answer)
    ours = greedy(path, prompts, 64)
    same = sum(one == two for one, two in zip(ours, theirs))
    assert same >= least, f"{same} of {len(PROMPTS)} answers are equal"
    engine = opened(path, "32bit")
    try:
        for ids, one, two in zip(prompts, ours, theirs):
            if one != two:
                at = next(i for i, (x, y) in enumerate(zip(one, two)) if x != y)
                *_, (_, scores) = engine.score(ids + one[:at])
                assert scores[-1][one[at]] - scores[-1][two[at]] < 0.1
    finally:
        engine.close()
