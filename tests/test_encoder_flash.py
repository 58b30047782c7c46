"""Encoders as Jina's own code stores XLM-RoBERTa (jina-reranker-v2, jina-embeddings-v3): scores and vectors of transformers' models with
the same weights under other names; task adapters; what such configs may not ask for."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from encoder_gguf_files import write_encoder
from encoder_models import POOLING, made_encoder, random_model, states_of, unigrams, unit
from hub_user import HubUser
from safetensors.numpy import load_file, save_file
from server_process import serving
from test_encoders import TEXTS, never, opened, returned, rows_of
from transformers import JinaEmbeddingsV3Model

from effllm import EffllmError, UsageError
from effllm.runtime.config import read_config
from effllm.runtime.encoders import is_encoder
from effllm.runtime.encoders.encoder_config import read_encoder_config
from effllm.runtime.generation.served_encoder import ServedEncoder
from effllm.runtime.library.local_model import local_model

# What the published config states beside the sizes.
SAID = {"architectures": ["XLMRobertaForSequenceClassification"], "attention_probs_dropout_prob": 0.1, "auto_map": {
    "AutoConfig": "configuration_xlm_roberta.XLMRobertaFlashConfig", "AutoModel": "modeling_xlm_roberta.XLMRobertaModel",
    "AutoModelForSequenceClassification": "modeling_xlm_roberta.XLMRobertaForSequenceClassification"}, "bos_token_id": 0,
    "classifier_dropout": None, "emb_pooler": None, "eos_token_id": 2, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "num_labels": 1,
    "id2label": {"0": "LABEL_0"}, "initializer_range": 0.02, "label2id": {"LABEL_0": 0}, "layer_norm_eps": 1e-5, "output_past": True,
    "pad_token_id": 1, "position_embedding_type": "absolute", "torch_dtype": "bfloat16", "transformers_version": "4.40.0",
    "type_vocab_size": 1, "use_cache": False, "use_flash_attn": True}
RENAMED = {"embeddings.LayerNorm": "emb_ln", "encoder.layer.": "encoder.layers.", "attention.output.dense": "mixer.out_proj",
           "attention.output.LayerNorm": "norm1", "intermediate.dense": "mlp.fc1", "output.dense": "mlp.fc2", "output.LayerNorm": "norm2"}


def flash(folder: Path, head: str = "ForSequenceClassification", **said: object) -> torch.nn.Module:
    """Writes transformers' model as Jina's code does."""
    more = {"num_labels": 1} if head.startswith("For") else {}
    model = random_model("XLMRoberta", head, pad_token_id=1, type_vocab_size=1, layer_norm_eps=1e-5, **more)
    made_encoder(folder, model, None if more else POOLING, cut=unigrams)
    config = json.loads((folder / "config.json").read_text())
    sizes = ("hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers", "vocab_size")
    (folder / "config.json").write_text(json.dumps({**SAID, **{name: config[name] for name in sizes}, **said}))
    tensors, parts = load_file(folder / "model.safetensors"), ("query", "key", "value")
    for name in [each for each in tensors if "attention.self.query" in each]:
        joined = np.concatenate([tensors.pop(name.replace("query", part)) for part in parts])
        tensors[name.replace("attention.self.query", "mixer.Wqkv")] = joined
    for name in list(tensors):
        other = name
        for theirs, own in RENAMED.items():
            other = other.replace(theirs, own)
        tensors[other] = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors")
    return model


def test_scores_are_those_of_the_model_it_is(tmp_path: Path) -> None:
    """From a folder, whose config is not a model name_type, and from a file, which llama.cpp writes as BERT with joined matrices."""
    model = flash(tmp_path / "m")
    assert is_encoder(tmp_path / "m") and not read_encoder_config(tmp_path / "m", strict=True).warnings
    assert local_model("m", tmp_path / "m").family == "xlm_roberta_flash"
    encodings = ServedEncoder(opened(tmp_path / "m"))
    assert encodings.encoder.n_ctx == 398
    documents = [TEXTS[0], TEXTS[2], "a king"]
    *_, ranked = encodings.rank(TEXTS[1], documents)
    model.double()
    for document, score in zip(documents, ranked.scores, strict=True):
        ids, _ = encodings.tokenizer.encode_pair(TEXTS[1], document)
        with torch.no_grad():
            logit = model(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids))).logits[0, 0]
        assert score == pytest.approx(float(torch.sigmoid(logit)), abs=2e-6)
    with pytest.raises(UsageError, match=r"reranker, which does not generate text \(xlm_roberta_flash\)"):
        read_config(tmp_path / "m")
    file = write_encoder(tmp_path / "m", tmp_path / "m.gguf", pooling="rank")
    *_, again = ServedEncoder(opened(file)).rank(TEXTS[1], documents)
    assert again.scores == ranked.scores


def test_vectors_of_such_a_model(tmp_path: Path) -> None:
    model = flash(tmp_path / "m", "Model", architectures=["XLMRobertaModel"])
    encoder, rows = opened(tmp_path / "m"), [row for row in rows_of() if len(row) <= 398]
    for row, own in zip(rows, returned(encoder.vectors(rows, never)), strict=True):
        np.testing.assert_allclose(unit(own), unit(states_of(model, row).mean(0)), atol=2e-6, rtol=0)


@pytest.mark.parametrize(("said", "message"), [
    ({"position_embedding_type": "alibi"}, "position_embedding_type 'alibi'"), ({"lora_adaptations": [3]}, "lora_adaptations is"),
    ({"lora_adaptations": ["a"], "task_instructions": {"a": 3}}, "task_instructions"), ({"lora_adaptations": ["a"]}, "holds no tensor"),
    ({"num_labels": 2, "id2label": {"0": "a", "1": "b"}}, "2 labels")])
def test_what_does_not_run_is_named(tmp_path: Path, said: dict, message: str) -> None:
    flash(tmp_path / "m", **said)
    with pytest.raises(EffllmError, match=message) as refused:
        opened(tmp_path / "m")
    assert refused.value.hint


def test_a_config_that_names_another_class_is_none() -> None:
    from effllm.runtime.encoders import is_encoder_config

    assert is_encoder_config(SAID) and is_encoder_config({"auto_map": {"AutoConfig": "jinaai/a--b.XLMRobertaFlashConfig"}})
    for other in ({"AutoConfig": "a.LlamaConfig"}, {"AutoConfig": 3}, ["AutoConfig"], {}):
        assert not is_encoder_config({**SAID, "auto_map": other})
    assert not is_encoder_config({**SAID, "model_type": "llama"}) and is_encoder_config({**SAID, "model_type": "xlm-roberta"})


TASKS = {"retrieval.query": "who: ", "retrieval.passage": "", "separation": ""}
MATRICES = ("mixer.Wqkv", "mixer.out_proj", "mlp.fc1", "mlp.fc2")
TABLES = ("embeddings.word_embeddings", "embeddings.token_type_embeddings")


def with_tasks(folder: Path, rank: int = 4, alpha: float = 2.0) -> dict[str | None, JinaEmbeddingsV3Model]:
    """Writes a model as jina-embeddings-v3 is published, with adapters of its tasks; by task, and None for none, what transformers has
    once the task's products are added to its weights."""
    model, draw = random_model("JinaEmbeddingsV3", pad_token_id=1, type_vocab_size=1), np.random.default_rng(2)
    made_encoder(folder, model)
    plain, stored, models = load_file(folder / "model.safetensors"), {}, {None: model}
    merged = {task: dict(plain) for task in TASKS}
    for name, values in plain.items():
        place = name.removesuffix(".weight")
        if not name.endswith(".weight") or not place.endswith((*MATRICES, *TABLES)):
            stored[f"roberta.{name.removeprefix('roberta.')}"] = values
            continue
        rows, depth = values.shape
        looked_up = place.endswith(TABLES)
        shapes = ((rows, rank), (rank, depth)) if looked_up else ((rank, depth), (rows, rank))
        a, b = (draw.standard_normal((len(TASKS), *shape)).astype(np.float32) * 0.2 for shape in shapes)
        own = f"roberta.{place.removeprefix('roberta.')}.parametrizations.weight"
        stored |= {f"{own}.original": values, f"{own}.0.lora_A": a, f"{own}.0.lora_B": b}
        for number, task in enumerate(TASKS):
            merged[task][name] = values + (a[number] @ b[number] if looked_up else b[number] @ a[number]) * np.float32(alpha / rank)
    for task, tensors in merged.items():
        other = folder.parent / task
        model.save_pretrained(other)
        save_file(tensors, other / "model.safetensors", {"format": "pt"})
        models[task] = JinaEmbeddingsV3Model.from_pretrained(other).eval()
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    sizes = ("hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers", "vocab_size")
    said = {name: each for name, each in SAID.items() if name not in ("num_labels", "id2label", "label2id")}
    (folder / "config.json").write_text(json.dumps({
        **said, **{name: config[name] for name in sizes}, "architectures": ["XLMRobertaModel"], "position_embedding_type": "rotary",
        "rotary_emb_base": 20000.0, "load_trained_adapters": True, "lora_adaptations": [*TASKS], "lora_alpha": alpha, "lora_rank": rank,
        "lora_dropout_p": 0.0, "lora_main_params_trainable": False, "matryoshka_dimensions": [16, 32], "task_instructions": TASKS,
        "truncate_dim": None}))
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([{**modules[0], "type": "custom_st.Transformer", "kwargs": ["task"]}, *modules[1:]]))
    return models


def test_adapters_of_tasks(tmp_path: Path) -> None:
    """By prompt name: few tokens and many, which use streamed parts and whole matrices, with the prompts before texts."""
    models = with_tasks(tmp_path / "m")
    config = read_encoder_config(tmp_path / "m", strict=True)
    assert not config.warnings and [name for name, _ in config.tasks] == [*TASKS] and config.context_length == 400
    encodings = ServedEncoder(opened(tmp_path / "m", threads=2))
    texts = [TEXTS[0], " ".join(TEXTS * 12)]
    found = {}
    for task, model in models.items():
        *_, embedded = encodings.embed(texts, prompt_name=task)
        for text, own in zip(texts, embedded.vectors, strict=True):
            ids = encodings.tokenizer.encode(TASKS.get(task, "") + text)
            np.testing.assert_allclose(own, unit(states_of(model, ids).mean(0)), atol=3e-6, rtol=0)
        found[task] = embedded.vectors[0]
    assert all(found[one] @ found[other] < 0.999 for one in found for other in found if one != other)
    user = HubUser(tmp_path, "http://127.0.0.1:9")
    assert "\ntasks       retrieval.query, retrieval.passage, separation\n" in user.run("show", tmp_path / "m").out
    with pytest.raises(UsageError, match="no prompt 'clustering'"):
        next(encodings.embed(texts, prompt_name="clustering"))
    with serving(model=str(tmp_path / "m")) as server:  # as Jina's API asks for it
        reply = server.request("POST", "/v1/embeddings", {"input": texts[:1], "task": "retrieval.query"})
        other = server.request("POST", "/v1/embeddings", {"input": texts[:1], "task": "clustering"})
    for told, task in ((reply, "retrieval.query"), (other, None)):
        np.testing.assert_allclose(told.json["data"][0]["embedding"], found[task], atol=1e-6, rtol=0)
    assert (encodings.embedding_prompts.query, encodings.embedding_prompts.document) == ("retrieval.query", "retrieval.passage")


@pytest.mark.peer
@pytest.mark.slow
def test_llama_cpp_ranks_by_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It tells the number of which scores are the sigmoid; what it is read beside is cut into tokens here."""
    llama_cpp = pytest.importorskip("llama_cpp")
    flash(tmp_path / "m")
    file = write_encoder(tmp_path / "m", tmp_path / "m.gguf", pooling="rank")
    encodings, peer = ServedEncoder(opened(file)), llama_cpp.Llama(str(file), embedding=True, verbose=False, n_ctx=256, n_batch=256,
                                                                   pooling_type=llama_cpp.LLAMA_POOLING_TYPE_RANK, n_threads=2)
    *_, ranked = encodings.rank(TEXTS[1], [TEXTS[0], TEXTS[2]])
    for document, score in zip((TEXTS[0], TEXTS[2]), ranked.scores, strict=True):
        ids, _ = encodings.tokenizer.encode_pair(TEXTS[1], document)
        monkeypatch.setattr(peer, "tokenize", lambda _, ids=ids: ids)
        logit = peer.embed(document)[0]
        assert 1 / (1 + np.exp(-logit)) == pytest.approx(score, abs=2e-3)
