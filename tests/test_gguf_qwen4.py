"""GGUF files of Qwen 4: its own metadata keys, and settings that no file can express; its export is tested with that of all families."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from export_models import exported, model, scores

from effllm.offload.gguf_header import GgufHeader
from effllm.offload.safetensors_header import CheckpointError
from effllm.runtime.gguf.config import model_config
from effllm.runtime.gguf.store import read_header
from effllm.runtime.source import open_store

TABLE = "model.layers.1.ple.ple_embedding.ngram_embedding.weight"
IDS = np.random.default_rng(3).integers(10, 4000, 60).tolist()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("qwen4")
    return exported(model("qwen4_exp_text", base / "source", ple_embed_dim=64, heads_per_ngram=1), base / "m.gguf", "Q8_0")


@pytest.fixture(scope="module")
def header(file: Path) -> GgufHeader:
    return read_header(file)


def test_its_keys_are_read(header: GgufHeader) -> None:
    config = model_config(header, {}, strict=True)
    own, index = config.ngrams, config.indexer.shape
    assert (own.layers, own.shape.size, own.tables_per_order, own.width, own.eos_token_id) == ((1,), 3, 1, 32, 7)
    assert config.recurrent.sigmoid_gate
    assert (config.residual_streams, config.residual_gate_rank, index.heads, index.width, index.tokens_per_key, index.top_k) == (
        2, 32, 4, 32, 4, 128)
    assert config.recurrent_layers == (0, 1, 2) and config.recurrent.tiled


def test_rows_of_a_table_in_blocks_are_read_one_by_one(file: Path) -> None:
    """And those of a text are among what the folder answers with."""
    with open_store(file, low_bit=True) as store:
        info = store.tensors[TABLE]
        whole = store.read(info).reshape(info.shape[0], -1)
        assert info.dtype == "F16" and all(np.array_equal(store.read(info, row, row + 1), whole[row]) for row in (0, 17, len(whole) - 1))
    wanted = scores(file.parent / "source", IDS)
    assert np.abs(scores(file, IDS) - wanted).mean() < 0.03 * np.abs(wanted).max()


def with_heights(heights: np.ndarray) -> dict[str, object]:
    return {"ple.head_vocab_sizes": heights, "ple.head_offsets": np.concatenate([[0], np.cumsum(heights)[:-1]])}


@pytest.mark.parametrize(("change", "said"), [
    (lambda data: {"ple.layer_multipliers": data["ple.layer_multipliers"] + np.uint64(2)}, "do not follow from the seed 1234"),
    (lambda data: {"ple.head_offsets": data["ple.head_offsets"] + np.uint64(1)}, "ple.head_vocab_sizes .* for n-grams of 3 words"),
    (lambda data: with_heights(data["ple.head_vocab_sizes"] + np.uint64(900)), "of 208 rows, its keys say"),
    (lambda data: with_heights(data["ple.head_vocab_sizes"][::-1]), "do not follow"),
    (lambda data: {"ple.layers": np.array([0, 1])}, "n-grams in several layers"),
    (lambda data: {"ple.layers": np.array([3])}, "a layer of another kind"),
    (lambda data: {"attention.compress_ratios": np.array([0, 0, 0, 0])}, r"compress_ratios \[\]"),
    (lambda data: {"attention.compress_ratios": np.array([0, 0, 0])}, "expected a number for each of 4 layers"),
    (lambda data: {"attention.compress_ratios": "4"}, "expected a number for each of 4 layers"),
    (lambda data: {"embedding_length_per_layer_input": -3}, "ple.head_vocab_sizes"),
    (lambda data: {"attention.indexer.top_k": None}, "lacks key qwen4exp.attention.indexer.top_k"),
    (lambda data: {"hyper_connection.count": 1}, "hyper_connection.count")])
def test_lies_of_a_file_are_named(header: GgufHeader, change: Callable[[dict], dict[str, object]], said: str) -> None:
    own = {key.removeprefix("qwen4exp."): value for key, value in header.metadata.items()}
    changed = {f"qwen4exp.{key}": value for key, value in change(own).items()}
    metadata = {key: value for key, value in {**header.metadata, **changed}.items() if value is not None}
    with pytest.raises(CheckpointError, match=said) as caught:
        model_config(replace(header, metadata=metadata), {})
    assert caught.value.hint and "\n" not in caught.value.message
