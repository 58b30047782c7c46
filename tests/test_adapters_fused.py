"""Adapters of models whose checkpoints fuse, split or transpose matrices: rows of B follow the rows of the weight, in folders and in files
that order them differently."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from conversions import options, run
from export_models import MODELS, exported, model
from family_models import Case
from lora_adapters import PREFIX, RANK, adapter, peft, random, weights
from safetensors.torch import save_file
from saved_models import saved
from test_adapters import assert_near, logits, of_all_matrices, opened

from effllm import EffllmError
from effllm.runtime.adapters.merge import Merged, merge

# Model -> the matrix of its checkpoints that holds others, and the part of a layer that is all adapters of it change.
JOINED = {"gpt2": "attn.c_attn", "gpt_neox": "attention.query_key_value", "internlm2": "attention.wqkv", "falcon": "query_key_value",
          "falcon, two norms, groups, own head": "query_key_value", "phi3": "mlp.gate_up_proj", "qwen3_next": "linear_attn.in_proj_qkvz",
          "qwen3_5_text": "linear_attn.in_proj_qkv"}
QUICK = ("gpt2", "internlm2", "falcon, two norms, groups, own head", "qwen3_next")


def of_a_file(folder: Path, own: Path, out: Path, scratch: Path) -> Path:
    """The adapter in the order that a GGUF file of the model has: by what a file of B A in the place of the weights is made of."""
    alone = {name: torch.zeros_like(each) if each.ndim > 1 else each for name, each in weights(folder).items()}
    pairs = weights(own)
    for name, a in pairs.items():
        if ".lora_A." in name:
            change = pairs[name.replace("lora_A", "lora_B")] @ a
            held = name.removeprefix(PREFIX).replace("lora_A.weight", "weight")
            alone[held] = (change.T if change.shape != alone[held].shape or "c_" in held else change).to(alone[held].dtype).contiguous()
    scratch.mkdir()
    for path in folder.iterdir():
        if "safetensors" not in path.name:
            (scratch / path.name).write_bytes(path.read_bytes())
    save_file(alone, scratch / "model.safetensors", {"format": "pt"})
    read = gguf.GGUFReader(exported(scratch, scratch / "alone.gguf"))
    writer = gguf.GGUFWriter(out, bytes(read.fields["general.architecture"].parts[-1]).decode())
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    for tensor in read.tensors:
        values = np.array(tensor.data, np.float32)
        if tensor.name.startswith("blk.") and values.ndim == 2 and tensor.name.endswith(".weight") and np.abs(values).max() > 0 \
                and "conv1d" not in tensor.name:
            left, sizes, right = np.linalg.svd(values, full_matrices=False)
            rank = int((sizes > 0.02 * sizes[0]).sum())
            assert rank <= 2 * RANK
            writer.add_tensor(f"{tensor.name}.lora_a", np.ascontiguousarray(right[:rank]))
            writer.add_tensor(f"{tensor.name}.lora_b", np.ascontiguousarray(left[:, :rank] * sizes[:rank]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in JOINED])
def test_one_adapter_beside_a_folder_and_a_file_and_in_either_form(name: str, tmp_path: Path) -> None:
    base = model(name, tmp_path / "base")
    own = of_all_matrices(base, tmp_path / "own", size=0.2, fan_in_fan_out=name == "gpt2")
    assert any(JOINED[name] in each for each in weights(own))
    file, as_file = exported(base, tmp_path / "base.gguf"), of_a_file(base, own, tmp_path / "own.gguf", tmp_path / "alone")
    plain, expected = logits(opened(base)), logits(opened(base, own))
    assert np.abs(expected - plain).max() > 0.1 * np.abs(plain).max()
    near = 0.02 * np.abs(expected - plain).max() / np.abs(expected).max()
    for model_of, each in ((file, own), (file, as_file), (base, as_file)):
        assert_near(logits(opened(model_of, each)), expected, near)
    made = [[*merge(base, each, tmp_path / out)][-1] for each, out in ((own, "merged"), (as_file, "merged of a file"))]
    assert isinstance(made[0], Merged) and made[0].changed == made[1].changed == len(weights(own)) // 2
    before, one, other = (weights(each) for each in (base, made[0].folder, made[1].folder))
    for part, each in one.items():
        change = (each.float() - before[part].float()).abs().max()
        assert (other[part].float() - each.float()).abs().max() <= 0.02 * change + 1e-3, part
    assert_near(logits(opened(tmp_path / "merged")), expected, 3 * near)


def test_low_bit_weights_by_themselves_have_that_of_the_one_that_held_them(tmp_path: Path) -> None:
    """What is quantized has no matrix of the adapter's names any more."""
    saved(MODELS["gpt2"], base := tmp_path / "base")
    own = of_all_matrices(base, tmp_path / "own", size=0.2)
    run(base, tmp_path / "8bit", options("8bit"))
    plain, beside, expected = (logits(opened(*each)) for each in ((base,), (tmp_path / "8bit", own), (base, own)))
    assert np.abs(beside - expected).max() < 0.2 * np.abs(expected - plain).max()


def test_parts_that_are_read_as_one_may_be_changed_alone(tmp_path: Path) -> None:
    """OLMo Hybrid's queries, keys and values of linear attention; those without an adapter are unchanged."""
    from test_adapters import ALL

    saved(ALL["olmo_hybrid"], base := tmp_path / "base")
    name = next(each for each in weights(base) if each.endswith("linear_attn.k_proj.weight")).removesuffix(".weight")
    rows, columns = weights(base)[f"{name}.weight"].shape
    own = adapter(tmp_path / "own", peft({name: (0.1 * random(RANK, columns), 0.1 * random(rows, RANK))}))
    list(merge(base, own, tmp_path / "out"))
    merged, plain = (logits(opened(each)) for each in (tmp_path / "out", base))
    assert_near(logits(opened(base, own)), merged)
    assert np.abs(merged - plain).max() > 1e-3 * np.abs(plain).max()


def turned_over(folder: Path) -> tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A model whose matrices lie inputs before outputs; one that is as wide as high, with an A and a B."""
    saved(Case("gpt2", {"eos_token_id": 7, "bos_token_id": 7}), folder)
    name = "transformer.h.1.attn.c_proj"
    stored = weights(folder)[f"{name}.weight"]
    assert stored.shape == (64, 64)
    return name, stored.double(), random(RANK, 64), random(64, RANK, seed=1)


def test_what_lies_inputs_before_outputs_is_added_to_and_lengthened_by_outputs(tmp_path: Path) -> None:
    name, stored, a, b = turned_over(tmp_path / "base")
    lengths = random(64).abs() + 0.5
    changed = stored.T + 2.5 * b.double() @ a.double()
    for more, expected in (({}, changed), ({f"{PREFIX}{name}.lora_magnitude_vector": lengths},
                                           changed * (lengths.double() / changed.norm(dim=1))[:, None])):
        own = adapter(tmp_path / f"own{len(more)}", peft({name: (a, b)}) | more, fan_in_fan_out=True, use_dora=bool(more))
        list(merge(tmp_path / "base", own, tmp_path / f"out{len(more)}"))
        assert torch.allclose(weights(tmp_path / f"out{len(more)}")[f"{name}.weight"].double(), expected.T, rtol=1e-5, atol=1e-5)


def test_what_comes_whole_lies_as_the_model_s(tmp_path: Path) -> None:
    saved(Case("gpt2", {"eos_token_id": 7, "bos_token_id": 7}), tmp_path / "base")
    name = "transformer.h.1.mlp.c_fc"
    whole = random(*weights(tmp_path / "base")[f"{name}.weight"].shape)
    list(merge(tmp_path / "base", adapter(tmp_path / "own", {f"{PREFIX}{name}.weight": whole}), tmp_path / "out"))
    assert torch.equal(weights(tmp_path / "out")[f"{name}.weight"], whole)


def test_the_table_is_called_by_its_name_there(tmp_path: Path) -> None:
    turned_over(tmp_path / "base")
    name = "transformer.wte"
    rows = len(weights(tmp_path / "base")[f"{name}.weight"])
    pair = {f"{PREFIX}{name}.lora_embedding_A": random(RANK, rows), f"{PREFIX}{name}.lora_embedding_B": random(64, RANK)}
    own = adapter(tmp_path / "own", pair)
    with pytest.raises(EffllmError, match=r"changes 'transformer.wte.weight', which adapters cannot change") as refused:
        opened(tmp_path / "base", own)
    assert "effllm export" in refused.value.hint
    with pytest.raises(EffllmError, match="changes the embeddings but not the tied output head in the same way"):
        list(merge(tmp_path / "base", own, tmp_path / "out"))


def test_a_file_that_changes_a_head_of_its_own_is_merged(tmp_path: Path) -> None:
    saved(Case("llama", {"tie_word_embeddings": False}), base := tmp_path / "base")
    before = weights(base)
    a, b = random(RANK, before["lm_head.weight"].shape[1]), random(len(before["lm_head.weight"]), RANK)
    writer = gguf.GGUFWriter(tmp_path / "own.gguf", "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 2.0 * RANK)
    for part, values in (("a", a), ("b", b)):
        writer.add_tensor(f"output.weight.lora_{part}", values.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert [*merge(base, tmp_path / "own.gguf", tmp_path / "out")][-1].changed == 1
    after = weights(tmp_path / "out")
    assert torch.allclose(after["lm_head.weight"], before["lm_head.weight"] + 2.0 * b @ a, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(after[name], before[name]) for name in before if name != "lm_head.weight")
