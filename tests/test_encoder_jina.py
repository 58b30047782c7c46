"""Jina Embeddings v2: vectors against a plain float64 computation, from folders and from GGUF files."""

import json
from pathlib import Path

import numpy as np
import pytest
from encoder_gguf_files import write_encoder
from encoder_models import POOLING, made_encoder, random_model, unit
from jina_models import jina, jina_states, slopes
from test_encoder_files import LONG
from test_encoders import TEXTS, never, opened, returned, rows_of

from effllm import EffllmError
from effllm.offload.checkpoint import TensorStore
from effllm.runtime.config_reader import read_json
from effllm.runtime.encoders import is_encoder
from effllm.runtime.encoders.encoder_config import family_of, read_encoder_config
from effllm.runtime.encoders.jina_bert import alibi_slopes
from effllm.runtime.encoders.weights import FolderTensors, Tensors
from effllm.runtime.generation.served_encoder import ServedEncoder

CODE = pytest.mark.parametrize("of_code", [False, True], ids=["text", "code"])


@CODE
@pytest.mark.parametrize("heads", [4, 6])
def test_vectors_are_those_of_the_definition(tmp_path: Path, of_code: bool, heads: int) -> None:
    folder, tensors = jina(tmp_path / "m", of_code, heads)
    encoder = opened(folder, threads=2)
    assert is_encoder(folder) and encoder.n_ctx == 8192
    for rows in (rows_of(), rows_of((5, 20))):  # several pieces of many tokens, and few that all threads share
        for row, own in zip(rows, returned(encoder.vectors(rows, never)), strict=True):
            np.testing.assert_allclose(unit(own), unit(jina_states(tensors, row, heads).mean(0)), atol=2e-6, rtol=0)


def test_places_are_told_by_scores_alone(tmp_path: Path) -> None:
    """ALiBi is symmetric, so a text and its mirror image have one mean, and one in another order does not."""
    encoder, row = opened(jina(tmp_path / "m")[0]), rows_of((12,))[0]
    own, mirrored, moved = returned(encoder.vectors([row, row[::-1], [*row[5:], *row[:5]]], never))
    np.testing.assert_allclose(mirrored, own, atol=5e-6, rtol=0)
    assert np.abs(unit(own) - unit(moved)).max() > 1e-3


def test_a_gate_of_another_kind(tmp_path: Path) -> None:
    folder, tensors = jina(tmp_path / "m", feed_forward_type="reglu")
    row = rows_of((20,))[0]
    (own,) = returned(opened(folder).vectors([row], never))
    np.testing.assert_allclose(unit(own), unit(jina_states(tensors, row, relu=True).mean(0)), atol=2e-6, rtol=0)


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 12, 16, 20])
def test_slopes(heads: int) -> None:
    np.testing.assert_allclose(alibi_slopes(heads), slopes(heads), rtol=1e-6)


@CODE
def test_every_tensor_is_read(tmp_path: Path, of_code: bool) -> None:
    folder, _ = jina(tmp_path / "m", of_code)
    config = read_encoder_config(folder, strict=True)
    assert config.family == "jina_bert" and not config.warnings
    with TensorStore.open(folder) as store:
        tensors = Tensors(FolderTensors(store, family_of(config.family).PREFIXES))
        family_of(config.family).load(config, tensors)
        assert tensors.read == {*store.tensors}


@pytest.mark.parametrize(("changed", "said"), [
    ({"feed_forward_type": "original"}, "feed_forward_type 'original' is not supported"), ({"emb_pooler": "cls"}, "emb_pooler = 'cls'"),
    ({"model_type": "jina_bert", "position_embedding_type": "absolute"}, "position_embedding_type 'absolute' is not supported"),
    ({"architectures": ["JinaBertForSequenceClassification"]}, "rerankers are not supported"),
    ({"num_attention_heads": 5}, "is not a multiple")])
def test_what_does_not_run_is_named(tmp_path: Path, changed: dict, said: str) -> None:
    folder, _ = jina(tmp_path / "m", **changed)
    with pytest.raises(EffllmError) as refused:
        opened(folder)
    assert said in refused.value.message and refused.value.hint


def test_a_folder_without_a_list_of_modules_is_pooled_as_its_config_says(tmp_path: Path) -> None:
    folder, _ = jina(tmp_path / "m")
    row = rows_of((9,))[0]
    (wanted,) = returned(opened(folder).vectors([row], never))
    (folder / "modules.json").unlink()
    (folder / "1_Pooling" / "config.json").unlink()
    (own,) = returned(opened(folder).vectors([row], never))
    assert (own == wanted).all()
    raw = read_json(folder / "config.json")
    (folder / "config.json").write_text(json.dumps({name: each for name, each in raw.items() if name != "emb_pooler"}))
    with pytest.raises(EffllmError, match="this model's folder states no pooling"):
        opened(folder)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(POOLING))
    (own,) = returned(opened(folder).vectors([row], never))
    assert (own == wanted).all()


@CODE
@pytest.mark.parametrize("split", [False, True], ids=["joined", "split"])
def test_gguf_files(tmp_path: Path, of_code: bool, split: bool) -> None:
    folder, _ = jina(tmp_path / "m", of_code)
    file = write_encoder(folder, tmp_path / "m.gguf", "jina-bert-v2", split_gates=split)
    own, other = opened(file), opened(folder)
    assert is_encoder(file) and own.n_ctx == 8192 and own.config.family == "jina_bert"
    for made, wanted in zip(returned(own.vectors(rows_of(), never)), returned(other.vectors(rows_of(), never)), strict=True):
        assert (made == wanted).all()
    for text in (*TEXTS, *LONG):
        assert own.tokenizer.encode(text) == other.tokenizer.encode(text)


@pytest.mark.parametrize("arch", ["jina-bert-v2", "nomic-bert"])
def test_a_file_that_ranks_is_refused(tmp_path: Path, arch: str) -> None:
    folder = jina(tmp_path / "m")[0] if arch == "jina-bert-v2" else made_encoder(tmp_path / "m", random_model("NomicBert"))
    with pytest.raises(EffllmError, match="rerankers? .*not supported|reranker, which is not supported") as refused:
        opened(write_encoder(folder, tmp_path / "m.gguf", arch, pooling="rank"))
    assert refused.value.hint


@pytest.mark.peer
@pytest.mark.slow
@pytest.mark.parametrize(("of_code", "split"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("heads", [4, 12])
def test_vectors_are_those_of_llama_cpp(tmp_path: Path, of_code: bool, split: bool, heads: int) -> None:
    """But for joined gates of the model for code, of whose halves it takes the first for the gate, as of the others'."""
    llama_cpp = pytest.importorskip("llama_cpp")
    folder, _ = jina(tmp_path / "m", of_code, heads, 96, max_position_embeddings=512)
    file = write_encoder(folder, tmp_path / "m.gguf", "jina-bert-v2", split_gates=split)
    peer = llama_cpp.Llama(str(file), embedding=True, verbose=False, n_ctx=512, n_batch=512, n_ubatch=512, n_threads=2)
    texts = [*TEXTS, "the fox was king of all beasts in the forest " * 30]
    *_, made = ServedEncoder(opened(file)).embed(texts)
    for text, own in zip(texts, made.vectors, strict=True):
        assert own @ np.array(peer.embed(text, normalize=True)) > 0.9999
