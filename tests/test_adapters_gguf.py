"""GGUF adapters of experts and embeddings, which must be merged: the result equals that of the same adapter in PEFT's format."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from export_models import SIZES, exported
from family_models import CASES, Case
from lora_adapters import PREFIX, RANK, adapter, peft, random, weights
from saved_models import saved
from saved_tokenizers import with_words_of_fable
from test_adapters import opened

from effllm import EffllmError
from effllm.runtime.adapters.merge import Merged, merge

EXPERTS, KINDS = 5, {"w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps"}
TABLE = "model.embed_tokens"


def pairs_of(base: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """For all experts, by their modules."""
    found = {}
    for number, (name, held) in enumerate(sorted(weights(base).items())):
        if ".experts." in name:
            rows, depth = held.shape
            found[name.removesuffix(".weight")] = 0.1 * random(RANK, depth, seed=number), 0.1 * random(rows, RANK, seed=number + 999)
    return found


def table_of(base: Path) -> tuple[torch.Tensor, torch.Tensor]:
    rows, depth = weights(base)[f"{TABLE}.weight"].shape
    return 0.3 * random(RANK, rows, seed=7), 0.3 * random(depth, RANK, seed=8)


def as_file(out: Path, tensors: dict[str, torch.Tensor]) -> Path:
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 2.0 * RANK)
    for name, values in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(values.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def as_converted(out: Path, pairs: dict[str, tuple[torch.Tensor, torch.Tensor]], table: tuple[torch.Tensor, torch.Tensor]) -> Path:
    """What llama.cpp's converter makes of it: experts of a layer behind one another, and the table's A by tokens."""
    made = {"token_embd.weight.lora_a": table[0].T, "token_embd.weight.lora_b": table[1]}
    for layer in {name.split("layers.")[1].split(".")[0] for name in pairs}:
        for kind, part in KINDS.items():
            own = [pairs[f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{kind}"] for expert in range(EXPERTS)]
            made |= {f"blk.{layer}.{part}.weight.lora_{which}": torch.stack(each) for which, each in zip("ab", zip(*own), strict=True)}
    return as_file(out, made)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = Case("mixtral", {**SIZES, "num_local_experts": EXPERTS, "num_experts_per_tok": 2})
    saved(case, folder := tmp_path_factory.mktemp("mixture") / "base")
    return with_words_of_fable(folder)


@pytest.fixture(scope="module")
def forms(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An adapter of PEFT and the file that is made of it."""
    pairs, table, folder = pairs_of(base), table_of(base), tmp_path_factory.mktemp("forms")
    tensors = peft(pairs) | {f"{PREFIX}{TABLE}.lora_embedding_{part}": each for part, each in zip("AB", table, strict=True)}
    return adapter(folder / "own", tensors, lora_alpha=2 * RANK), as_converted(folder / "own.gguf", pairs, table)


def test_experts_and_embeddings_of_a_file_are_merged_as_those_of_a_folder(base: Path, forms: tuple[Path, Path], tmp_path: Path) -> None:
    before = weights(base)
    made = [[*merge(base, own, tmp_path / out)][-1] for own, out in zip(forms, ("one", "other"), strict=True)]
    changed = {name for name in before if ".experts." in name or TABLE in name}
    assert all(isinstance(each, Merged) and each.changed == len(changed) > 3 * EXPERTS for each in made)
    one, other = (weights(each.folder) for each in made)
    for name, held in before.items():
        assert torch.equal(one[name], held) == torch.equal(other[name], held) == (name not in changed)
        assert torch.allclose(one[name], other[name], rtol=1e-5, atol=1e-6)


def test_what_they_change_is_told_to_want_merging(base: Path, forms: tuple[Path, Path]) -> None:
    for own in forms:
        with pytest.raises(EffllmError, match="which adapters cannot change at run time") as refused:
            opened(base, own)
        assert "effllm export" in refused.value.hint


def test_embeddings_that_are_the_head_too_are_not_changed_alone(tmp_path: Path) -> None:
    saved(CASES["mixtral, window, bfloat16"], base := tmp_path / "base")
    table = table_of(base)
    own = as_file(tmp_path / "own.gguf", {"token_embd.weight.lora_a": table[0].T, "token_embd.weight.lora_b": table[1]})
    with pytest.raises(EffllmError, match="changes the embeddings but not the tied output head in the same way"):
        list(merge(base, own, tmp_path / "out"))


@pytest.mark.parametrize("a, b", [((EXPERTS - 1, RANK, 64), (EXPERTS - 1, 96, RANK)), ((RANK, 64), (96, RANK)),
                                  ((EXPERTS, RANK, 64), (96, RANK))])
def test_experts_that_do_not_fit_are_refused(base: Path, a: tuple[int, ...], b: tuple[int, ...], tmp_path: Path) -> None:
    own = as_file(tmp_path / "own.gguf", {f"blk.0.ffn_gate_exps.weight.lora_{part}": random(*shape) for part, shape in zip("ab", (a, b))})
    with pytest.raises(EffllmError, match="changes 'blk.0.ffn_gate_exps.weight' with matrices of"):
        list(merge(base, own, tmp_path / "out"))


@pytest.mark.peer
@pytest.mark.slow
def test_llama_cpp_means_the_same_by_the_file(base: Path, forms: tuple[Path, Path], tmp_path: Path) -> None:
    """Beside its own file of the model, against the merged folder."""
    peer = pytest.importorskip("llama_cpp")
    file = exported(base, tmp_path / "base.gguf", "F16")
    ids = np.random.default_rng(3).integers(3, 256, 40).tolist()
    found = []
    for asked in ({}, {"lora_path": str(forms[1])}):
        theirs = peer.Llama(str(file), n_ctx=256, logits_all=True, verbose=False, **asked)
        theirs.eval(ids)
        found.append(np.array(theirs.scores[: len(ids)]))
    list(merge(base, forms[1], tmp_path / "merged"))
    engine = opened(tmp_path / "merged")
    ours = np.concatenate([each.copy() for _, each in engine.score(ids)])
    engine.close()
    assert np.abs(ours - found[1]).max() < 0.02 * np.abs(found[1] - found[0]).max()
