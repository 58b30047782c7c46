"""EmbeddingGemma 2: transformers' vectors, from folders, quantized folders and GGUF files, several texts in a pass; what is refused."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from bidirectional_models import INNER, WIDTH, embedding_gemma2, mean_of
from config_samples import refused
from gguf_samples import add_fable_tokenizer
from hub_user import HubUser
from packaged_embedder import FABLE
from safetensors.numpy import load_file
from transformers import EmbeddingGemma2Config, EmbeddingGemma2TextConfig

from effllm import EffllmError, UsageError
from effllm.runtime.config import parse_config, read_config
from effllm.runtime.config_rope import GLOBAL, LOCAL
from effllm.runtime.engine import Engine, EngineOptions, open_engine
from effllm.runtime.generation.embedding import MEAN, all_dense_layers, embed_text, embed_texts, read_pooling_mode
from effllm.runtime.generation.served_model import ServedModel
from effllm.runtime.kv.bidirectional import MAX_DEFAULT_CTX, single_pass_options
from effllm.runtime.kv.varlen_cache import supports_varlen
from effllm.runtime.tokenizer import Tokenizer

LENGTHS = (1, 8, 9, 10, 40, 300, 512)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedding_gemma2(tmp_path_factory.mktemp("models") / "whole", whole=True)


@pytest.fixture(scope="module")
def engine(model: Path):
    *_, engine = open_engine(model, EngineOptions(ctx=512, strict=True))
    yield engine
    engine.close()


def ids_of(count: int) -> list[int]:
    return [1 + (7 * each + 3 * (each // 11)) % 300 for each in range(count)]


def finished(steps: object) -> object:
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value


def made(engine: Engine, ids: list[int]) -> np.ndarray:
    return finished(embed_text(engine, ids, MEAN, lambda: False, all_dense_layers(engine)))


def theirs(folder: Path, ids: list[int]) -> np.ndarray:
    mean = mean_of(folder, ids)
    return mean / np.linalg.norm(mean)


def assert_near(own: np.ndarray, other: np.ndarray, share: float = 1e-4) -> None:
    assert own.shape == other.shape and np.abs(own - other).max() < share * np.abs(other).max()


def test_vectors_are_those_of_transformers(model: Path, engine: Engine) -> None:
    """Of texts shorter and longer than a window and than a pass of other models, as the model is published: inside one with a tower."""
    assert read_pooling_mode(model) == MEAN and engine.config.bidirectional and {*engine.config.windows} == {9, None}
    assert [each.matrix.shape for each in all_dense_layers(engine)] == [(INNER, WIDTH)]
    for count in LENGTHS:
        assert_near(made(engine, ids_of(count)), theirs(model, ids_of(count)))


def test_several_texts_share_a_pass_and_have_the_bits_of_each_alone(engine: Engine) -> None:
    rows = [ids_of(length)[::-1] for length in (1, 3, 3, 9, 17, 40, 40, 100, 300)]
    assert supports_varlen(engine)
    together = finished(embed_texts(engine, rows, MEAN, lambda: False, all_dense_layers(engine)))
    for row, own in zip(rows, together, strict=True):
        assert np.array_equal(own, made(engine, row))


def test_the_text_part_by_itself_with_other_shapes(tmp_path: Path) -> None:
    """Heads of one size, biases, a window of one token, and a width that layers are given unlike the stream's."""
    folder = embedding_gemma2(tmp_path / "model", global_head_dim=32, attention_bias=True,
                              sliding_window=1, hidden_size_per_layer_input=48, sliding_window_pattern=3)
    *events, engine = open_engine(folder, EngineOptions(ctx=128, strict=True))
    assert not engine.config.warnings and engine.config.windows == (2, 2, None, None)
    for count in (1, 2, 3, 70):
        assert_near(made(engine, ids_of(count)), theirs(folder, ids_of(count)))
    engine.close()


def test_a_user_asks_by_the_prompts_that_the_model_has(tmp_path: Path) -> None:
    """For the first numbers of vectors alone, too, as the model was trained to make them."""
    folder = embedding_gemma2(tmp_path / "model", whole=True, vocab_size=4096)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).symlink_to(FABLE / name)
    prompts = {"query": "task: search result | query: ", "document": "title: none | text: "}
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts, "default_prompt_name": "document"}))
    user, tokenizer = HubUser(tmp_path, "http://127.0.0.1:9"), Tokenizer.load(folder, read_config(folder))
    for name, flags in (("query", ("--prompt-name", "query")), ("document", ())):
        ran = user.run("embed", folder, "The fox was king.", "-c", "128", "--dimensions", "32", *flags)
        first = mean_of(folder, tokenizer.encode(prompts[name] + "The fox was king."))[:32]
        assert ran.code == 0
        assert_near(np.array(json.loads(ran.out)["embedding"]), first / np.linalg.norm(first))


@pytest.mark.slow
def test_a_folder_of_few_bits(model: Path, tmp_path: Path) -> None:
    """In which the matrix behind the mean stays as it was stored."""
    user, out = HubUser(tmp_path, "http://127.0.0.1:9"), tmp_path / "b"
    made_smaller = user.run("quantize", model, "-o", out, "--bits", "8", "--no-kv-profile")
    assert made_smaller.code == 0 and f'effllm embed {out} "a text"' in made_smaller.err
    assert user.run("verify", out).code == 0 and user.run("plan", out).code == 0
    *_, small = open_engine(out, EngineOptions(ctx=128))
    dense, stored = all_dense_layers(small), load_file(model / "model.safetensors")
    assert np.array_equal(dense[0].matrix, stored["language_model.embedding_projection.weight"])
    own, rows = made(small, ids_of(60)), [ids_of(length) for length in (3, 20, 40)]
    for row, each in zip(rows, finished(embed_texts(small, rows, MEAN, lambda: False, dense)), strict=True):
        assert np.array_equal(each, made(small, row))
    small.close()
    assert own @ theirs(model, ids_of(60)) > 0.99


# Name in a checkpoint -> in a file, of a layer and outside.
PARTS = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
         "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
         "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
         "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm", "layer_scalar": "layer_output_scale",
         "ple_block.per_layer_input_gate": "inp_gate", "ple_block.per_layer_projection": "proj",
         "ple_block.post_per_layer_input_norm": "post_norm"}
OUTSIDE = {"embed_tokens": "token_embd", "norm": "output_norm", "embedding_projection": "output",
           "ple.per_layer_model_projection": "per_layer_model_proj", "ple.per_layer_projection_norm": "per_layer_proj_norm"}
ARCH = "gemma-embedding2"


def as_file(folder: Path, out: Path, kind: str = "F32", **other: object) -> Path:
    """The file that llama.cpp's converter makes of a text model. `other`: keys that say something else, None for none."""
    config = json.loads((folder / "config.json").read_text())
    local = np.array([each == LOCAL for each in config["layer_types"]])
    wide = config["per_layer_config"]["1"]
    writer = gguf.GGUFWriter(out, ARCH)
    add_fable_tokenizer(writer)
    writer.add_add_eos_token(True)
    ropes = config["rope_parameters"]
    keys = {"block_count": config["num_hidden_layers"], "context_length": config["max_position_embeddings"],
            "embedding_length": config["hidden_size"], "feed_forward_length": config["intermediate_size"],
            "attention.head_count": config["num_attention_heads"], "attention.key_length": wide["head_dim"],
            "attention.value_length": wide["head_dim"], "attention.key_length_swa": config["head_dim"],
            "attention.value_length_swa": config["head_dim"], "rope.dimension_count": wide["head_dim"],
            "rope.dimension_count_swa": config["head_dim"], "attention.sliding_window": 2 * config["sliding_window"],
            "attention.shared_kv_layers": 0, "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
            "embedding_length_out": config["embedding_dim"], "pooling_type": 1} | other
    for key, value in keys.items():
        if value is not None:
            writer.add_uint32(f"{ARCH}.{key}", value)
    writer.add_bool(f"{ARCH}.attention.causal", False)
    writer.add_float32(f"{ARCH}.attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    writer.add_float32(f"{ARCH}.rope.freq_base", ropes[GLOBAL]["rope_theta"])
    writer.add_float32(f"{ARCH}.rope.freq_base_swa", ropes[LOCAL]["rope_theta"])
    writer.add_sliding_window_pattern(local.tolist())
    writer.add_head_count_kv(np.where(local, config["num_key_value_heads"], wide["num_key_value_heads"]).tolist())
    for name, data in load_file(folder / "model.safetensors").items():
        parts = name.removesuffix(".weight").split(".")
        own = f"blk.{parts[1]}.{PARTS['.'.join(parts[2:])]}" if parts[0] == "layers" else OUTSIDE[".".join(parts)]
        if data.ndim == 2 and kind != "F32":
            packed = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(f"{own}.weight", gguf.quantize(data, packed), raw_dtype=packed)
        else:
            writer.add_tensor(f"{own}.weight", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def test_gguf_files(tmp_path: Path) -> None:
    """Whose window is as wide as both sides, and whose matrix behind the mean lies in the place of a head: vectors of the same bits."""
    folder = embedding_gemma2(tmp_path / "model", vocab_size=4096)
    *_, engine = open_engine(folder, EngineOptions(ctx=128))
    whole = [made(engine, ids_of(count)) for count in (1, 60)]
    engine.close()
    for kind, near in (("F32", 0.0), ("Q8_0", 0.2)):
        path = as_file(folder, tmp_path / f"{kind}.gguf", kind)
        *_, engine = open_engine(path, EngineOptions(ctx=128, strict=True))
        assert read_pooling_mode(path) == MEAN and not engine.config.warnings and engine.config.windows == read_config(folder).windows
        for count, own in zip((1, 60), whole, strict=True):
            assert np.abs(made(engine, ids_of(count)) - own).max() <= near * np.abs(own).max(), kind
        tokenizer = Tokenizer.load(path, engine.config)
        *_, embedded = ServedModel(engine, tokenizer).embed(["The fox."])
        assert np.array_equal(embedded.vectors[0], made(engine, [*tokenizer.encode("The fox."), *engine.config.eos_token_ids]))
        engine.close()


@pytest.mark.parametrize(("key", "value", "said"), [
    ("attention.sliding_window", 7, "sliding_window 7"), ("attention.value_length", 32, "value_length 32"),
    ("embedding_length_out", None, "lacks key"), ("embedding_length_out", 64, "has shape")])
def test_gguf_files_that_do_not_fit(tmp_path: Path, key: str, value: object, said: str) -> None:
    path = as_file(embedding_gemma2(tmp_path / "model", vocab_size=4096), tmp_path / "m.gguf", **{key: value})
    with pytest.raises(EffllmError, match=said) as error:
        list(open_engine(path, EngineOptions(ctx=128)))
    assert error.value.hint


def test_configs_as_transformers_writes_them() -> None:
    """The published sizes, which are what transformers assumes, whether they are said or not."""
    text = json.loads(EmbeddingGemma2TextConfig().to_json_string())
    assert set(text["layer_types"]) == {LOCAL, GLOBAL}
    config = parse_config(text, strict=True)
    assert config.bidirectional and config.layer_kv_heads[4:6] == ((2, 256), (1, 512)) and config.windows[4:6] == (513, None)
    assert (config.per_layer_input_dim, config.per_layer_input_vocab, config.pooled_dim, config.attn_scale) == (512, 0, 768, 1.0)
    assert [config.ropes[layer].theta for layer in (4, 5)] == [1e4, 1e6]
    assert parse_config({"model_type": "embedding_gemma2_text"}, strict=True) == config
    whole = parse_config(json.loads(EmbeddingGemma2Config(text_config=text).to_json_string()), strict=True)
    assert whole.layer_kv_heads == config.layer_kv_heads and not whole.warnings
    for towers, said in (({"vision_config": {}}, "images too"), ({"audio_config": {}}, "images and audio too")):
        (warning,) = parse_config({"model_type": "embedding_gemma2", "text_config": text, **towers}, strict=True).warnings
        assert said in warning
    refused({**text, "architectures": ["EmbeddingGemma2ForSequenceClassification"]}, "architectures")
    refused({**text, "per_layer_config": {"1": {"sliding_window": 3}}}, "per_layer_config")


def test_it_writes_no_text_and_no_file(model: Path, engine: Engine, tmp_path: Path) -> None:
    for run in (lambda: list(engine.prefill([5, 6])), lambda: list(engine.score([5, 6]))):
        with pytest.raises(UsageError, match="embedding model, which does not generate text"):
            run()
    user = HubUser(tmp_path, "http://127.0.0.1:9")
    for out, more in (("out.gguf", ()), ("out", ("--format", "compressed-tensors"))):
        ran = user.run("export", model, "-o", tmp_path / out, *more)
        assert ran.code and "embedding_gemma2_text models " in ran.err and "exported" in ran.err, ran.err


def test_a_context_that_nobody_asked_for_is_one_that_memory_holds() -> None:
    """Configs state more positions than a pass can take at once."""
    config = parse_config({"model_type": "embedding_gemma2_text"})
    assert config.context_length == 262_144
    options = single_pass_options(config, EngineOptions())
    assert (options.ctx, options.chunk) == (MAX_DEFAULT_CTX, MAX_DEFAULT_CTX)
    assert single_pass_options(config, EngineOptions(ctx=20_000)).chunk == 20_096
