"""Encoders in GGUF files: the vectors, scores and tokens of the folder that a file was written from, and of llama.cpp."""

from pathlib import Path

import numpy as np
import pytest
from encoder_gguf_files import write_encoder
from encoder_models import POOLING, made_encoder, merges_of_bytes, random_model, unigrams
from nomic_moe_models import nomic_moe
from test_encoders import KINDS, TEXTS, never, opened, returned, rows_of

from effllm import EffllmError, UsageError
from effllm.runtime.config import read_config
from effllm.runtime.encoders import is_encoder
from effllm.runtime.encoders.encoder import read_headers
from effllm.runtime.generation.served_encoder import ServedEncoder
from effllm.runtime.library.local_model import local_model

LONG = ["the fox is king, ? . who rules [SEP] of Beasts", "foxs foxx boat zzz \u00e4rger", "A b\tc\n\nD"]
WIDE = {"hidden_size": 64, "intermediate_size": 96}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_encoder(tmp_path_factory.mktemp("bert") / "model", random_model("Bert", **WIDE))


@pytest.mark.parametrize(("kind", "error"), [("F32", 0.0), ("F16", 3e-3), ("Q8_0", 4e-2)])
def test_vectors_are_those_of_the_folder(bert: Path, tmp_path: Path, kind: str, error: float) -> None:
    file = write_encoder(bert, tmp_path / "m.gguf", kind=kind)
    assert is_encoder(file)
    own, other = opened(file), opened(bert)
    for made, wanted in zip(returned(own.vectors(rows_of(), never)), returned(other.vectors(rows_of(), never)), strict=True):
        assert np.linalg.norm(made - wanted) <= error * np.linalg.norm(wanted)
    for text in (*TEXTS, *LONG):
        assert own.tokenizer.encode(text) == other.tokenizer.encode(text)
        assert own.tokenizer.encode_pair(text, "a fox") == other.tokenizer.encode_pair(text, "a fox")


def test_nomic(tmp_path: Path) -> None:
    folder = made_encoder(tmp_path / "m", random_model("NomicBert"))
    file = write_encoder(folder, tmp_path / "m.gguf", "nomic-bert")
    for made, wanted in zip(*(returned(opened(each).vectors(rows_of(), never)) for each in (file, folder)), strict=True):
        assert (made == wanted).all()


def test_nomic_with_experts(tmp_path: Path) -> None:
    folder, tensors = nomic_moe(tmp_path / "m", biased=False)
    file = write_encoder(folder, tmp_path / "m.gguf", "nomic-bert-moe")
    for made, wanted in zip(*(returned(opened(each).vectors(rows_of(), never)) for each in (file, folder)), strict=True):
        assert (made == wanted).all()


OTHERS = [("eurobert", "eurobert"), ("jina-bert-v3", "jina_embeddings_v3"), ("modern-bert", "modernbert")]


@pytest.mark.parametrize(("arch", "kind"), OTHERS)
def test_other_architectures(tmp_path: Path, arch: str, kind: str) -> None:
    name, more = KINDS[kind]
    folder = made_encoder(tmp_path / "m", random_model(name, **more))
    file = write_encoder(folder, tmp_path / "m.gguf", arch)
    for made, wanted in zip(*(returned(opened(each).vectors(rows_of(), never)) for each in (file, folder)), strict=True):
        assert (made == wanted).all()


def test_a_tokenizer_that_merges_bytes(tmp_path: Path) -> None:
    name, more = KINDS["modernbert"]
    folder = made_encoder(tmp_path / "m", random_model(name, **{**more, "vocab_size": 4100}), cut=merges_of_bytes)
    own, other = opened(write_encoder(folder, tmp_path / "m.gguf", "modern-bert")), opened(folder)
    for text in (*TEXTS, *LONG, "  caf\u00e9 12 <|user|>"):
        assert own.tokenizer.encode(text) == other.tokenizer.encode(text)
        assert own.tokenizer.encode_pair(text, "a fox") == other.tokenizer.encode_pair(text, "a fox")


def test_a_head_that_ranks(tmp_path: Path) -> None:
    folder = made_encoder(tmp_path / "m", random_model("Bert", "ForSequenceClassification", num_labels=1), pooling=None)
    file = write_encoder(folder, tmp_path / "m.gguf", pooling="rank")
    own, other = ([*ServedEncoder(opened(each)).rank(TEXTS[1], [TEXTS[0], TEXTS[2]])][-1] for each in (file, folder))
    assert own.scores == other.scores


@pytest.mark.parametrize(("head", "pooling"), [("Model", "mean"), ("ForSequenceClassification", "rank")])
def test_xlm_roberta(tmp_path: Path, head: str, pooling: str) -> None:
    """Whose positions a file has from the first one on, and whose tokenizer has scores."""
    more = {"num_labels": 1} if pooling == "rank" else {}
    model = random_model("XLMRoberta", head, pad_token_id=1, type_vocab_size=1, **more)
    folder = made_encoder(tmp_path / "m", model, None if more else POOLING, cut=unigrams)
    own, other = opened(write_encoder(folder, tmp_path / "m.gguf", pooling=pooling)), opened(folder)
    for text in (*TEXTS, "the  fox\n is 3", "foxking thefox"):
        assert own.tokenizer.encode(text) == other.tokenizer.encode(text)
        assert own.tokenizer.encode_pair(text, "a fox") == other.tokenizer.encode_pair(text, "a fox")
    assert own.n_ctx == other.n_ctx == 398
    if more:
        made, wanted = ([*ServedEncoder(each).rank(TEXTS[1], [TEXTS[0], TEXTS[2]])][-1].scores for each in (own, other))
        assert made == wanted
        return
    rows = [row for row in rows_of() if len(row) <= own.n_ctx]
    for made, wanted in zip(returned(own.vectors(rows, never)), returned(other.vectors(rows, never)), strict=True):
        assert (made == wanted).all()


@pytest.mark.parametrize("kind", ["distilbert", "roberta"])
def test_relatives_of_bert(tmp_path: Path, kind: str) -> None:
    """DistilBERT has no token types; RoBERTa counts positions after the padding id, merges bytes, and separates a pair by two tokens."""
    name, more = KINDS[kind]
    cut = {"cut": merges_of_bytes} if kind == "roberta" else {}
    folder = made_encoder(tmp_path / "m", random_model(name, **{**more, "vocab_size": 4100} if cut else more), **cut)
    own, other = opened(write_encoder(folder, tmp_path / "m.gguf")), opened(folder)
    assert own.n_ctx == other.n_ctx
    rows = [row for row in rows_of() if len(row) <= own.n_ctx]
    for made, wanted in zip(returned(own.vectors(rows, never)), returned(other.vectors(rows, never)), strict=True):
        assert (made == wanted).all()
    for text in TEXTS:
        assert own.tokenizer.encode(text) == other.tokenizer.encode(text)
    (ids, _), (single, _) = own.tokenizer.encode_pair(TEXTS[0], "a fox"), other.tokenizer.encode_pair(TEXTS[0], "a fox")
    assert len(ids) == len(single) + (kind == "roberta") and ids.count(ids[-1]) == 2 + (kind == "roberta")


def test_the_head_of_a_distilbert(tmp_path: Path) -> None:
    """Which is another than BERT's; a file says so by having no types of tokens."""
    model = random_model("DistilBert", "ForSequenceClassification", num_labels=1, **KINDS["distilbert"][1])
    folder = made_encoder(tmp_path / "m", model, pooling=None)
    own, other = (ServedEncoder(opened(each)) for each in (write_encoder(folder, tmp_path / "m.gguf", pooling="rank"), folder))
    rows = rows_of((9, 20))
    made, wanted = (returned(each.encoder.scores(rows, [[0] * len(row) for row in rows], never)) for each in (own, other))
    assert made == wanted


def test_what_is_told_of_a_file(bert: Path, tmp_path: Path) -> None:
    file = write_encoder(bert, tmp_path / "m.gguf", pooling="cls")
    config, _, pooling = read_headers(file)
    assert (config.family, config.context_length, config.hidden_size, pooling.mode) == ("bert", 400, 64, "cls")
    listed = local_model("m", file)
    assert listed.family == "bert" and listed.context == 400 and listed.params > 0
    with pytest.raises(UsageError, match="an embedding model, which does not generate text"):
        read_config(file)
    with pytest.raises(UsageError, match="states no pooling for embeddings"):
        opened(write_encoder(bert, tmp_path / "n.gguf", pooling=None))


@pytest.mark.parametrize(("changed", "said"), [
    ({"tokenizer.ggml.model": "llama"}, "has tokenizer type"), ({"bert.attention.head_count": 7}, "bert.attention.head_count 7"),
    ({"bert.block_count": 4}, "holds no tensor encoder.layer.3")])
def test_files_that_do_not_run_are_named(bert: Path, tmp_path: Path, changed: dict, said: str) -> None:
    file = write_encoder(bert, tmp_path / "m.gguf", changed=changed)
    with pytest.raises(EffllmError) as refused:
        opened(file)
    assert said in refused.value.message and refused.value.hint


@pytest.mark.peer
@pytest.mark.slow
@pytest.mark.parametrize(("arch", "kind"), [("bert", "bert"), ("bert", "distilbert"), ("nomic-bert", "nomic_bert"),
                                            ("nomic-bert-moe", ""), *OTHERS])
def test_vectors_are_those_of_llama_cpp(tmp_path: Path, arch: str, kind: str) -> None:
    """Whose GELU is the one by tanh, rounded to 16 bits, and which does not split pairs by types."""
    llama_cpp = pytest.importorskip("llama_cpp")
    if kind:
        name, more = KINDS[kind]
        folder = made_encoder(tmp_path / "m", random_model(name, **{**WIDE, **more}))
    else:
        folder, _ = nomic_moe(tmp_path / "m", biased=False)
    file = write_encoder(folder, tmp_path / "m.gguf", arch)
    peer = llama_cpp.Llama(str(file), embedding=True, verbose=False, n_ctx=256, n_batch=256, n_threads=2)
    texts = [*TEXTS, "the fox was king of all beasts in the forest " * 3]
    *_, made = ServedEncoder(opened(file)).embed(texts)
    for text, own in zip(texts, made.vectors, strict=True):
        other = np.array(peer.embed(text, normalize=True))
        assert own @ other > 0.9999
        assert opened(file).tokenizer.encode(text, False) == peer.tokenize(text.encode(), add_bos=False, special=False)
