"""Text embeddings: transformers' vectors, by the pooling that a model's files state, which is kept when the model is quantized."""

import json
from collections.abc import Generator
from pathlib import Path

import gguf
import numpy as np
import packaged_embedder
import pytest
from gguf_samples import fable_gguf
from hub_server import running
from hub_user import HubUser, sharded
from packaged_embedder import ENDS, FABLE, MODULES, embedder, expected

from effllm import ContextOverflow, EffllmError, UsageError
from effllm.runtime.config import read_config
from effllm.runtime.engine import Engine, EngineOptions, open_engine
from effllm.runtime.generation.embedding import LAST, MEAN, embed_text, normalized, read_pooling_mode
from effllm.runtime.generation.served_model import ServedModel
from effllm.runtime.tokenizer import Tokenizer

TEXTS = ("Once upon a time there was a fox.", "The king saw the fox and the fox saw the king. " * 40)


@pytest.fixture(scope="module")
def engine():
    *_, engine = open_engine(FABLE, EngineOptions(ctx=1024))
    yield engine
    engine.close()


def made(steps: Generator) -> np.ndarray | None:
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value


@pytest.mark.parametrize("way", [LAST, MEAN])
@pytest.mark.parametrize("text", TEXTS)
def test_a_vector_is_that_of_transformers(engine: Engine, text: str, way: str) -> None:
    ids = Tokenizer.load(FABLE, read_config(FABLE)).encode(text)
    own, theirs = made(embed_text(engine, ids, way, lambda: False)), expected(FABLE, ids, way)
    assert own.dtype == np.float32 and own.shape == (256,) and abs(np.linalg.norm(own) - 1) < 1e-6
    assert own @ theirs > 0.99999 and np.abs(own - theirs).max() < 1e-3
    assert engine.tokens == [] and np.array_equal(made(embed_text(engine, ids, way, lambda: False)), own)


def test_the_family_that_embeddings_are_made_of(tmp_path: Path) -> None:
    """As its published models are stored: without a head, and without `model.` before the names."""
    import torch
    from transformers import Qwen3Config, Qwen3Model

    torch.manual_seed(5)
    config = Qwen3Config(vocab_size=301, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, head_dim=32,
                         num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, initializer_range=0.2)
    Qwen3Model(config).save_pretrained(tmp_path)
    stated = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**stated, "architectures": ["Qwen3ForCausalLM"]}))
    *_, engine = open_engine(tmp_path, EngineOptions())
    for count in (1, 9, 300):
        ids = [(7 * each + 3) % 301 for each in range(count)]
        own, theirs = made(embed_text(engine, ids, LAST, lambda: False)), expected(tmp_path, ids)
        assert own @ theirs > 0.99999 and np.abs(own - theirs).max() < 1e-3
    engine.close()


def test_gguf_files_say_it_themselves(tmp_path: Path) -> None:
    """And whether a text ends with a token, of which a prompt is told nothing."""
    kinds = {name: tmp_path / f"{name}.gguf" for name in ("LAST", "MEAN", "NONE", "CLS")}
    for name, path in kinds.items():
        def made_for_it(writer: gguf.GGUFWriter, name: str = name) -> None:
            writer.add_pooling_type(gguf.PoolingType[name])
            writer.add_add_eos_token(name == "LAST")

        fable_gguf(path, "F32", made_for_it)
    assert read_pooling_mode(kinds["LAST"]) == LAST and read_pooling_mode(kinds["MEAN"]) == MEAN
    with pytest.raises(UsageError, match="its file states no pooling"):
        read_pooling_mode(kinds["NONE"])
    with pytest.raises(EffllmError, match="pooling_type = 2 is not supported"):
        [*open_engine(kinds["CLS"], EngineOptions())]
    *_, engine = open_engine(kinds["LAST"], EngineOptions())
    tokenizer = Tokenizer.load(kinds["LAST"], engine.config)
    *_, embedded = ServedModel(engine, tokenizer).embed(TEXTS)
    engine.close()
    for text, own in zip(TEXTS, embedded.vectors, strict=True):
        ids = tokenizer.encode(text)
        assert ids[-1] != tokenizer.encode(ENDS)[0]
        assert own @ expected(FABLE, ids + tokenizer.encode(ENDS)) > 0.99999 > own @ expected(FABLE, ids)


def test_what_has_no_vector(engine: Engine) -> None:
    for ids in ([], [5] * 1025):
        with pytest.raises(ContextOverflow, match=f"a text has {len(ids)} tokens and the context holds 1024"):
            made(embed_text(engine, ids, LAST, lambda: False))
    assert made(embed_text(engine, [5] * 9, LAST, lambda: True)) is None and engine.tokens == []
    assert np.array_equal(normalized(np.zeros(3)), np.zeros(3))


def test_a_text_that_is_refused_costs_no_pass(tmp_path: Path) -> None:
    """Be it the last of many: neither the texts before it, nor what the cache holds."""
    *_, engine = open_engine(embedder(tmp_path / "model"), EngineOptions(ctx=256))
    replies = ServedModel(engine, Tokenizer.load(FABLE, engine.config))
    list(engine.prefill([5, 6, 7]))
    for last, kind in ((TEXTS[1], ContextOverflow), ([5] * 257, ContextOverflow), ([1 << 20], UsageError)):
        with pytest.raises(kind):
            list(replies.embed([TEXTS[0], last]))
        assert engine.tokens == [5, 6, 7]
    *_, embedded = replies.embed(TEXTS, truncate=True)
    assert (len(embedded.vectors), embedded.tokens) == (2, len(replies.tokenizer.encode(TEXTS[0])) + 256) and engine.tokens == []
    engine.close()


@pytest.mark.parametrize(("pooling", "way"), [
    (packaged_embedder.LAST, LAST), ({"pooling_mode_mean_tokens": True}, MEAN), ({"pooling_mode": "mean"}, MEAN),
    ({"pooling_mode": "lasttoken", "embedding_dimension": 4}, LAST)])
def test_ways_that_files_state(tmp_path: Path, pooling: object, way: str) -> None:
    assert read_pooling_mode(embedder(tmp_path / "a", pooling)) == way
    assert read_pooling_mode(embedder(tmp_path / "b", pooling,
                                      [{"type": "sentence_transformers.sentence_transformer.modules.Pooling"}])) == way


@pytest.mark.parametrize(("pooling", "modules", "said"), [
    ({"pooling_mode_cls_token": True}, MODULES, "pooling is 'cls_token'"), ({}, MODULES, "state no pooling mode"),
    ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True}, MODULES, "pooling is 'last and mean'"),
    ([], MODULES, "not an embedding model"), ({"pooling_mode": "max"}, MODULES, "pooling is 'max'"),
    (packaged_embedder.LAST, [*MODULES, {"type": "a.Dense"}], "go through a module 'a.Dense'"),
    (packaged_embedder.LAST, ["x"], "through a module None"), (packaged_embedder.LAST, 7, "through a module None")])
def test_ways_that_do_not_run(tmp_path: Path, pooling: object, modules: object, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        read_pooling_mode(embedder(tmp_path / "a", pooling, modules))
    assert "qwen3-embedding" in caught.value.hint


def test_models_that_say_nothing_or_nonsense(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not an embedding model"):
        read_pooling_mode(FABLE)
    folder = embedder(tmp_path / "a")
    (folder / "1_Pooling" / "config.json").write_text("{")
    with pytest.raises(EffllmError, match="cannot be read as JSON"):
        read_pooling_mode(folder)


def test_it_goes_along_where_a_model_is_made_smaller(tmp_path: Path) -> None:
    user = HubUser(tmp_path, "http://127.0.0.1:9")
    for source, out in ((embedder(tmp_path / "a"), tmp_path / "b"), (tmp_path / "a", tmp_path / "c")):
        assert user.run("quantize", source, "-o", out, "--bits", "8", "--no-kv-profile").code == 0
        assert read_pooling_mode(out) == LAST and user.run("verify", out).code == 0


def test_it_comes_with_a_download(tmp_path: Path) -> None:
    user = HubUser(tmp_path, "")
    with running() as hub:
        beside = {"1_Pooling/config.json": json.dumps(packaged_embedder.LAST).encode(), "modules.json": json.dumps(MODULES).encode(),
                  "2_Normalize/config.json": b"{}"}
        hub.add("org/name", files=sharded(FABLE) | beside)
        user.endpoint = hub.endpoint
        assert user.run("pull", "org/name", "--bits", "4").code == user.run("pull", "org/name").code == 0
        commit = hub.repos["org/name"].commit
    pulled = tmp_path / "hf" / "hub" / "models--org--name" / "snapshots" / commit
    kept = tmp_path / "data" / "effllm" / "models" / "org--name" / commit / "4bit"
    assert read_pooling_mode(pulled) == read_pooling_mode(kept) == LAST and not (pulled / "2_Normalize").exists()
