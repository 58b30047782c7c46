"""ModernBERT decoders: the published config, and the matrix before the head: what calibration sees after it, embeddings, which are taken
before it, and that no head is stored twice."""

from pathlib import Path

import numpy as np
import pytest
import torch
from config_samples import refused
from conversions import options, run
from family_models import CASES, oracle, our_logits, text, written
from safetensors.torch import load_file, save_file

from effllm.runtime.calibrate import calibrate
from effllm.runtime.config import parse_config
from effllm.runtime.source import open_store

PUBLISHED = {
    "architectures": ["ModernBertDecoderForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 50281,
    "classifier_activation": "gelu", "classifier_bias": False, "classifier_dropout": 0.0, "classifier_pooling": "mean", "cls_token_id":
    50281, "decoder_bias": True, "deterministic_flash_attn": False, "embedding_dropout": 0.0, "eos_token_id": 50282,
    "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "gradient_checkpointing": False, "hidden_activation": "gelu",
    "hidden_size": 768, "initializer_cutoff_factor": 2.0, "initializer_range": 0.02, "intermediate_size": 1152, "layer_norm_eps": 1e-05,
    "local_attention": 128, "local_rope_theta": 160000.0, "max_position_embeddings": 7999, "mlp_bias": False, "mlp_dropout": 0.0,
    "model_type": "modernbert-decoder", "norm_bias": False, "norm_eps": 1e-05, "num_attention_heads": 12, "num_hidden_layers": 22,
    "pad_token_id": 50283, "position_embedding_type": "sans_pos", "repad_logits_with_grad": False, "sep_token_id": 50282,
    "sparse_pred_ignore_index": -100, "sparse_prediction": False, "tie_word_embeddings": True, "torch_dtype": "float32", "vocab_size":
    50368}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory):
    """A tiny model, and its folder."""
    folder = tmp_path_factory.mktemp("ettin")
    return written(CASES["modernbert_decoder"], folder), folder


def test_the_published_config() -> None:
    config = parse_config(PUBLISHED, strict=True)
    assert config.warnings == () and config.windows == (None, *(64, 64, None) * 7)
    assert {rope.theta for rope in config.ropes} == {160_000.0} and config.head_transform_act == "gelu" and config.head_bias
    local = parse_config({key: value for key, value in PUBLISHED.items() if key != "local_rope_theta"}).ropes
    assert [rope.theta for rope in local[:3]] == [160_000.0, 10_000.0, 10_000.0]


@pytest.mark.parametrize(("key", "value"), [
    ("sliding_window", 128), ("layer_types", ["chunked_attention"] * 22), ("classifier_activation", "mish"), ("local_attention", 1),
    ("rope_parameters", {"rope_type": "default", "rope_theta": 1e4})])
def test_what_it_may_not_have_is_named(key: str, value: object) -> None:
    refused({**PUBLISHED, key: value}, key)


def test_calibration_sees_what_the_head_reads(made) -> None:
    """Behind the matrix, the activation and the norm before it; a column that is looked up counts as much as the average of the head's."""
    model, folder = made
    ids = text(model, 160)
    (found,) = [each.roles["embed"] for each in calibrate(folder, ids, threads=1) if getattr(each, "key", None) == "outer"]
    with torch.inference_mode():
        read = model.lm_head(model.model(torch.tensor([ids[:160]])).last_hidden_state)[0].double().numpy()
    hessian = read.T @ read / len(read)
    wanted = hessian + hessian.diagonal().mean() * np.eye(len(hessian))
    assert np.allclose(found.hessian / found.hessian.trace(), wanted / wanted.trace(), atol=1e-3)


def test_vectors_are_what_lies_before_that_matrix(made) -> None:
    from effllm.runtime.engine import open_engine
    from effllm.runtime.generation.embedding import MEAN, embed_texts
    from effllm.runtime.prepare import EngineOptions

    model, folder = made
    ids = text(model, 40)
    *_, engine = open_engine(folder, EngineOptions(kv="32bit", device="cpu", ctx=64, threads=1))
    try:
        try:
            steps = embed_texts(engine, [ids], MEAN, lambda: False)
            while True:
                next(steps)
        except StopIteration as end:
            (found,) = end.value
    finally:
        engine.close()
    with torch.inference_mode():
        wanted = model.model(torch.tensor([ids])).last_hidden_state[0].mean(0).numpy()
    assert np.allclose(found, wanted / np.linalg.norm(wanted), atol=1e-4)


def test_a_head_that_is_the_embedding_again_is_left_out(made, tmp_path: Path) -> None:
    model, folder = made
    tensors, ids = load_file(folder / "model.safetensors"), text(model, 70)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    table = tensors["model.embeddings.tok_embeddings.weight"]
    save_file({**tensors, "decoder.weight": table.clone()}, tmp_path / "model.safetensors")
    with open_store(tmp_path) as store:
        assert "decoder.weight" not in store.tensors
    assert np.array_equal(our_logits(tmp_path, ids), our_logits(folder, ids))
    save_file({**tensors, "decoder.weight": -table}, tmp_path / "model.safetensors")
    with open_store(tmp_path) as store:
        assert "decoder.weight" in store.tensors and "another matrix" in store.notices[-1]


def test_what_stands_before_the_head_stays_as_it_is_stored(made, tmp_path: Path) -> None:
    """In eight bits the model answers nearly the same; its folder holds that matrix in 32 bits."""
    model, folder = made
    ids = text(model, 70)
    run(folder, tmp_path / "out", options("8bit"))
    with open_store(tmp_path / "out") as store:
        assert store.tensors["lm_head.dense.weight"].dtype == "F32"
    wanted, found = oracle(model, ids), our_logits(tmp_path / "out", ids)
    assert np.square(found - wanted).mean() < 3e-3 * np.square(wanted - wanted.mean()).mean()
