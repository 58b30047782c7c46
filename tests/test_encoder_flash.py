"""Encoders as Jina's own code stores XLM-RoBERTa (jina-reranker-v2): scores and vectors of the model that transformers has, whose weights
are written under the other names; what of such configs does not run."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from encoding_files import write_encoder
from encoding_models import POOLING, made_encoder, random_model, states_of, unigrams, unit
from safetensors.numpy import load_file, save_file
from test_encoders import TEXTS, never, opened, returned, rows_of

from effllm import EffllmError, UsageError
from effllm.runtime.answers.encodings import Encodings
from effllm.runtime.config import read_config
from effllm.runtime.encoders import is_encoder
from effllm.runtime.encoders.shape import read_encoder_config
from effllm.runtime.library.listing import local_model

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
    """From a folder, whose config names no model_type, and from a file, which llama.cpp writes as BERT with joined matrices."""
    model = flash(tmp_path / "m")
    assert is_encoder(tmp_path / "m") and not read_encoder_config(tmp_path / "m", strict=True).warnings
    assert local_model("m", tmp_path / "m").family == "xlm_roberta_flash"
    encodings = Encodings(opened(tmp_path / "m"))
    assert encodings.encoder.n_ctx == 398
    documents = [TEXTS[0], TEXTS[2], "a king"]
    *_, ranked = encodings.rank(TEXTS[1], documents)
    model.double()
    for document, score in zip(documents, ranked.scores, strict=True):
        ids, _ = encodings.tokenizer.pair(TEXTS[1], document)
        with torch.no_grad():
            logit = model(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids))).logits[0, 0]
        assert score == pytest.approx(float(torch.sigmoid(logit)), abs=2e-6)
    with pytest.raises(UsageError, match=r"ranks documents and writes nothing \(xlm_roberta_flash\)"):
        read_config(tmp_path / "m")
    file = write_encoder(tmp_path / "m", tmp_path / "m.gguf", pooling="rank")
    *_, again = Encodings(opened(file)).rank(TEXTS[1], documents)
    assert again.scores == ranked.scores


def test_vectors_of_such_a_model(tmp_path: Path) -> None:
    model = flash(tmp_path / "m", "Model", architectures=["XLMRobertaModel"])
    encoder, rows = opened(tmp_path / "m"), [row for row in rows_of() if len(row) <= 398]
    for row, own in zip(rows, returned(encoder.vectors(rows, never)), strict=True):
        np.testing.assert_allclose(unit(own), unit(states_of(model, row).mean(0)), atol=2e-6, rtol=0)


@pytest.mark.parametrize(("said", "message"), [
    ({"position_embedding_type": "rotary"}, "position_embedding_type = 'rotary'"),
    ({"lora_adaptations": ["retrieval.query"]}, "lora_adaptations"), ({"num_labels": 2, "id2label": {"0": "a", "1": "b"}}, "2 labels")])
def test_what_does_not_run_is_named(tmp_path: Path, said: dict, message: str) -> None:
    flash(tmp_path / "m", **said)
    with pytest.raises(EffllmError, match=message) as refused:
        opened(tmp_path / "m")
    assert refused.value.hint


def test_a_config_that_names_another_class_is_none() -> None:
    from effllm.runtime.encoders import reads_alone

    assert reads_alone(SAID) and reads_alone({"auto_map": {"AutoConfig": "jinaai/a--b.XLMRobertaFlashConfig"}})
    for other in ({"AutoConfig": "a.LlamaConfig"}, {"AutoConfig": 3}, ["AutoConfig"], {}):
        assert not reads_alone({**SAID, "auto_map": other})
    assert not reads_alone({**SAID, "model_type": "llama"})


@pytest.mark.peer
@pytest.mark.slow
def test_llama_cpp_ranks_by_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It tells the number of which scores are the sigmoid; what it is read beside is cut into tokens here."""
    llama_cpp = pytest.importorskip("llama_cpp")
    flash(tmp_path / "m")
    file = write_encoder(tmp_path / "m", tmp_path / "m.gguf", pooling="rank")
    encodings, peer = Encodings(opened(file)), llama_cpp.Llama(str(file), embedding=True, verbose=False, n_ctx=256, n_batch=256,
                                                               pooling_type=llama_cpp.LLAMA_POOLING_TYPE_RANK, n_threads=2)
    *_, ranked = encodings.rank(TEXTS[1], [TEXTS[0], TEXTS[2]])
    for document, score in zip((TEXTS[0], TEXTS[2]), ranked.scores, strict=True):
        ids, _ = encodings.tokenizer.pair(TEXTS[1], document)
        monkeypatch.setattr(peer, "tokenize", lambda _, ids=ids: ids)
        logit = peer.embed(document)[0]
        assert 1 / (1 + np.exp(-logit)) == pytest.approx(score, abs=2e-3)
