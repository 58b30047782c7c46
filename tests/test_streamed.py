"""Streamed weights give the bits of weights in memory: every format, family and kernel, prompt and answer, threads and caches."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from conversions import odd_model, options, run
from family_models import CASES
from saved_models import saved
from streamed_models import random_model, streaming

import effllm
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.gguf.export import export_gguf
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.weights import stream_layout

FABLE = Path(effllm.__path__[0]) / "models" / "fable"


def logits(engine: Engine, prompt: int = 188, answer: int = 8) -> np.ndarray:
    """Of every position of a prompt in chunks (one of few tokens), then token by token over the end of a page, then few at once."""
    vocabulary = engine.config.vocab_size
    ids = np.random.default_rng(7).integers(0, vocabulary, prompt + answer + 8).tolist()
    engine.reset()
    rows = [found.copy() for _, found in engine.score(ids[:prompt])]
    rows += [engine.forward_logits(ids[at : at + 1]).copy() for at in range(prompt, prompt + answer)]
    return np.concatenate([*rows, engine.forward_logits(ids[prompt + answer :]).copy()])


def resident(folder: Path, **asked: object) -> np.ndarray:
    engine = list(open_engine(folder, EngineOptions(device="cpu", ctx=256, **asked)))[-1]
    assert engine.model.pager.resident
    found = logits(engine)
    engine.close()
    return found


def streamed(folder: Path, **asked: object) -> np.ndarray:
    engine = streaming(folder, ctx=256, **asked)
    found = logits(engine)
    assert engine.model.pager.traffic.reads > 0
    engine.close()
    return found


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of some rows, so that every matrix of a small model is cut."""
    monkeypatch.setattr(stream_layout, "PART_NBYTES", 24 << 10)
    monkeypatch.setattr(stream_layout, "MIN_STREAMED_NBYTES", 512)


FORMATS = ("bf16", "4bit", "8bit", "3bit", "affine4:64", "symmetric6:32", "ternary")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The packaged model by format, made once."""

    @cache
    def made(spec: str) -> Path:
        if spec == "bf16":
            return FABLE
        out = tmp_path_factory.mktemp("quantized") / "fable"
        run(FABLE, out, options(spec))
        return out

    return made


@pytest.fixture(scope="module")
def expected(folders: Callable[[str], Path]) -> Callable[[str], np.ndarray]:
    return cache(lambda spec: resident(folders(spec)))


@pytest.mark.parametrize("spec", FORMATS[:2])
@pytest.mark.parametrize("threads", (1, 2))
@pytest.mark.parametrize("direct", (True, False), ids=("direct", "buffered"))
def test_everything_on_the_disk_gives_the_same_bits(spec: str, threads: int, direct: bool, folders, expected) -> None:
    assert np.array_equal(streamed(folders(spec), threads=threads, direct=direct), expected(spec))


@pytest.mark.parametrize("spec", [pytest.param(spec, marks=() if spec in ("bf16", "4bit") else pytest.mark.slow) for spec in FORMATS])
def test_some_rows_at_a_time_give_the_same_bits(spec: str, folders, expected, small_parts: None) -> None:
    assert np.array_equal(streamed(folders(spec)), expected(spec))


@pytest.mark.parametrize("spec", FORMATS[:2])
@pytest.mark.parametrize("keep", (2, 3))
def test_what_is_pinned_between_changes_nothing(spec: str, keep: int, folders, expected, small_parts: None) -> None:
    assert np.array_equal(streamed(folders(spec), keep=keep, ring=1 << 20), expected(spec))


@pytest.mark.parametrize("spec", ("4bit", *(pytest.param(each, marks=pytest.mark.slow) for each in ("bf16", "8bit"))))
def test_products_in_float32_give_the_same_bits(spec: str, folders, small_parts: None) -> None:
    assert np.array_equal(streamed(folders(spec), exact=True, kv="32bit"), resident(folders(spec), exact=True, kv="32bit"))


FAMILIES = ("llama, odd vocabulary", "llama, biases", "llama, tied, one KV head", "llama, shards, older dialect", "llama, float16", "qwen3",
            "phi3", "gemma", "gemma2", "olmo2", "olmo3", "ministral3", "seed_oss", "granite", "opt", "opt, no biases",
            "starcoder2", "nemotron_nas", "exaone4", "arcee", "ernie4_5", "ernie4_5, biases, yarn, bfloat16", "glm", "glm4", "qwen3_5_text",
            "qwen3_5_text, other layers", "lfm2", "lfm2, other taps, bfloat16", "bamba", "muse_glimmer", "modernbert_decoder", "codegen",
            "gpt_bigcode", "gpt_neo", "gptj", "persimmon", "rwkv7", "molmo2_text",
            "granitemoehybrid, state spaces", "nemotron_h", "falcon_h1", "nemotron", "stablelm", "apertus", "bitnet", "zamba2")
# Another of parts that one before it or behind it has.
LIKE_OTHERS = ("llama, odd vocabulary", "llama, float16", "gemma", "olmo3", "ministral3", "seed_oss", "opt, no biases", "exaone4", "arcee",
               "ernie4_5", "ernie4_5, biases, yarn, bfloat16", "glm4", "qwen3_5_text, other layers", "lfm2, other taps, bfloat16",
               "modernbert_decoder", "gpt_neo", "gptj", "molmo2_text", "granitemoehybrid, state spaces", "nemotron", "starcoder2")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in LIKE_OTHERS else ()) for name in FAMILIES])
def test_every_kind_of_block_gives_the_same_bits(name: str, tmp_path: Path, small_parts: None) -> None:
    saved(CASES[name], tmp_path / "model")
    assert np.array_equal(streamed(tmp_path / "model", keep=3), resident(tmp_path / "model"))


@pytest.mark.parametrize("name", ("phi3", "qwen3", "opt", "ernie4_5", "glm4", "qwen3_5_text", "lfm2", "granitemoehybrid, state spaces",
                                  "nemotron_h", "falcon_h1"))
def test_quantized_families_give_the_same_bits(name: str, tmp_path: Path, small_parts: None) -> None:
    saved(CASES[name], tmp_path / "model")
    run(tmp_path / "model", tmp_path / "out", options("4bit"))
    assert np.array_equal(streamed(tmp_path / "out"), resident(tmp_path / "out"))


def test_a_long_prompt_of_rows_near_one_another(tmp_path: Path) -> None:
    """More wide rows of the embedding than are fetched at once, all within reach of their neighbours."""
    wide = random_model(tmp_path / "wide", hidden_size=2048, vocab_size=6400, num_hidden_layers=1, intermediate_size=256,
                        num_attention_heads=4, num_key_value_heads=1, head_dim=64)
    ids, found = list(range(0, 6400, 16)), []
    for engine in (list(open_engine(wide, EngineOptions(device="cpu", ctx=512)))[-1], streaming(wide, ctx=512)):
        engine.reset()
        found.append(np.concatenate([rows.copy() for _, rows in engine.score(ids)]))
        engine.close()
    assert np.array_equal(*found)


def test_widths_that_no_group_divides(tmp_path: Path, small_parts: None) -> None:
    odd_model(tmp_path / "odd")
    for spec in ("codebook4:16", "affine3:32"):
        run(tmp_path / "odd", tmp_path / spec, options(spec))
        engines = [list(open_engine(tmp_path / spec, EngineOptions(device="cpu", ctx=60)))[-1], streaming(tmp_path / spec, ctx=60)]
        one, other = (logits(engine, 30, 5) for engine in engines)
        assert np.array_equal(one, other)
        for engine in engines:
            engine.close()


def test_a_gguf_file(tmp_path: Path, small_parts: None) -> None:
    """Plain values are read from where they lie; rows that the file has in another order stay in memory."""
    path = tmp_path / "fable.gguf"
    list(export_gguf(FABLE, path, "F16", "fable"))
    engine = streaming(path, ctx=256)
    found, names = logits(engine), engine.model.streamed.parts.slices
    assert any("gate_proj" in name for name in names) and not any("q_proj" in name for name in names)
    engine.close()
    assert np.array_equal(found, resident(path))


def test_tensors_off_their_borders_stay_in_memory(tmp_path: Path, small_parts: None) -> None:
    """A header of odd length: every value lies across its border, where no kernel reads it."""
    folder = odd_model(tmp_path / "odd")
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    path.write_bytes((length + 1).to_bytes(8, "little") + raw[8 : 8 + length] + b" " + raw[8 + length :])
    engine = list(open_engine(folder, EngineOptions(device="cpu", ctx=60)))[-1]
    found = stream_layout.plan_layout(engine.model.tensors, engine.model.store)
    assert not found.parts and found.always_nbytes >= engine.model.nbytes
    engine.close()
