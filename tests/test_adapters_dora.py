"""DoRA adapters (with row magnitudes) applied at run time: the logits of the merged model, at any scale."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import CliRun
from family_models import Case
from gpu_runs import card_here, simulated
from lora_adapters import PREFIX, RANK, adapter, peft, random, weights
from safetensors.torch import load_file, save_file
from saved_models import saved
from streamed_models import streaming
from test_adapters import (  # noqa: F401  a fixture
    ALL,
    FABLE,
    assert_near,
    check_all,
    logits,
    low_bit,
    of_all_matrices,
    opened,
    widen,
)
from test_adapters_per_request import CHOICES, alone_and_together, logits_of

from effllm import EffllmError
from effllm.runtime.adapters.dora import OPENING, RATE
from effllm.runtime.adapters.loaded_adapters import load_adapters
from effllm.runtime.adapters.merge import merge
from effllm.runtime.config import read_config


def lengthened(folder: Path, out: Path, seed: int = 1) -> Path:
    """`of_all_matrices` with lengths of rows."""
    own = of_all_matrices(folder, out, seed, size=0.1, fan_in_fan_out="gpt2" in read_config(folder).family, use_dora=True)
    path = own / "adapter_model.safetensors"
    made, base = load_file(path), weights(folder)
    for name, b in list(made.items()):
        if ".lora_B." in name:
            held = base[name.removeprefix(PREFIX).replace("lora_B.weight", "weight")].float()
            sizes = held.norm(dim=1 if len(held) == len(b) and "c_" not in name else 0)
            made[name.replace("lora_B.weight", "lora_magnitude_vector")] = sizes * (1 + 0.3 * random(len(b), seed=seed))
    save_file(made, path)
    return own


@pytest.mark.parametrize("name", ["llama, biases", "gemma2", "gpt2", "phi3", "qwen3_next", "olmo_hybrid",
                                  *(pytest.param(name, marks=pytest.mark.slow) for name in ("deepseek_v2", "cohere", "gemma3n_text"))])
def test_what_is_beside_is_what_merging_makes(name: str, tmp_path: Path) -> None:
    """With biases, which have no length; behind norms; rows of a matrix that holds several."""
    saved(replace(ALL[name], dtype="float32"), tmp_path / "base")
    own = lengthened(tmp_path / "base", tmp_path / "own")
    list(merge(tmp_path / "base", own, tmp_path / "out"))
    made, plain = logits(opened(tmp_path / "out")), logits(opened(tmp_path / "base"))
    assert np.abs(made - plain).max() > 0.02 * np.abs(plain).max()
    assert_near(logits(opened(tmp_path / "base", own)), made)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lengthened(FABLE, tmp_path_factory.mktemp("adapters") / "own")


def test_lengths_are_those_of_the_weights_as_they_are_stored(low_bit: Path, own: Path, tmp_path: Path) -> None:  # noqa: F811
    widen(low_bit, tmp_path / "opened")
    list(merge(tmp_path / "opened", own, tmp_path / "merged"))
    assert_near(logits(opened(low_bit, own, exact=True)), logits(opened(tmp_path / "merged")), 3e-4)


def test_the_bits_are_the_same_on_any_threads_and_from_the_disk(low_bit: Path, own: Path) -> None:  # noqa: F811
    expected = logits(opened(low_bit, own, kv="16bit"))
    assert np.array_equal(logits(opened(low_bit, own, kv="16bit", threads=1)), expected)
    assert np.array_equal(logits(streaming(low_bit, ctx=256, spec="off", lora=(str(own),))), expected)


@pytest.mark.slow
def test_layers_on_a_gpu_have_their_adapters_there(own: Path) -> None:
    for asked in (own, f"{own}:0.5"):
        expected = logits(opened(FABLE, asked, exact=True))
        with card_here(simulated()):
            engine = opened(FABLE, asked, device="auto", gpu_layers=3, exact=True)
        assert engine.placement.devices.count("cuda") == 3
        assert_near(logits(engine), expected)


def test_a_share_is_one_of_what_it_changes(tmp_path: Path) -> None:
    """Beside another that has no lengths, and nothing of it is the model alone, to the bit."""
    saved(Case("llama", {"attention_bias": True}), base := tmp_path / "base")
    first, second = lengthened(base, tmp_path / "first"), of_all_matrices(base, tmp_path / "second", 50)
    for each in ("first", "second"):
        list(merge(base, tmp_path / each, tmp_path / f"{each} merged"))
    before, one, other = (weights(each) for each in (base, tmp_path / "first merged", tmp_path / "second merged"))
    half = {name: each + 0.5 * (one[name] - each) + (other[name] - each) for name, each in before.items()}
    (mixed := tmp_path / "mixed").mkdir()
    for name in ("config.json",):
        (mixed / name).write_bytes((base / name).read_bytes())
    save_file(half, mixed / "model.safetensors", {"format": "pt"})
    engine = opened(base, f"{first}:0.5", second)
    assert engine.prepared.adapters.gains and engine.adapter_scales == (0.5, 1.0)
    assert_near(logits(engine), logits(opened(mixed)))
    assert np.array_equal(logits(opened(base, f"{first}:0")), logits(opened(base)))
    chosen = opened(base, f"{first}:0")
    chosen.choose((1.0,))
    assert np.array_equal(logits(chosen), logits(opened(base, first)))


def test_texts_of_different_choices_share_a_pass(low_bit: Path, own: Path, tmp_path: Path) -> None:  # noqa: F811
    """Each has the bits that it has alone, and one that has nothing of any those of a run without."""
    pair = own, of_all_matrices(FABLE, tmp_path / "other", 50)
    for base in (FABLE, low_bit):
        alone = alone_and_together(base, pair)
        assert len({each.tobytes() for each in alone}) == len(CHOICES)
        plain = opened(base, kv="16bit")
        assert np.array_equal(alone[CHOICES.index((0.0, 0.0))], logits_of(plain, ())[1:11])
        plain.close()


def test_what_is_counted_is_there_before_it_is_measured(own: Path) -> None:
    before = load_adapters((str(own),), read_config(FABLE), check_all(FABLE))
    engine = opened(FABLE, own)
    after = engine.prepared.adapters
    engine.close()
    assert before.nbytes == after.nbytes and before.lengths.keys() == after.gains.keys() == after.weights.keys()
    assert {each.dtype for each in after.gains.values()} == {np.dtype(np.float32)} and before.digest != after.digest


def test_a_plan_says_how_long_measuring_takes(own: Path, tmp_path: Path) -> None:
    """As products that a thread makes; nothing where no rows get lengths."""
    both = own, of_all_matrices(FABLE, tmp_path / "plain")
    told = [CliRun("plan", FABLE, "--lora", each, "--json", "--no-probe", "-t", "2") for each in both]
    lengthened, plain = (json.loads(ran.out)["adapters"] for ran in told)
    assert lengthened["matrices"] == plain["matrices"] and plain["measuring_s"] == 0
    count = sum(tensor.numel() for name, tensor in weights(FABLE).items() if "layers" in name and tensor.dim() == 2)
    assert lengthened["measuring_s"] == pytest.approx(count * (OPENING + RANK) / (2 * RATE))
    assert "; computing row norms for DoRA takes about" in CliRun("plan", FABLE, "--lora", own, "--no-probe").out


def test_what_has_no_direction_is_refused(tmp_path: Path) -> None:
    saved(Case("llama"), base := tmp_path / "base")
    name = "model.layers.0.self_attn.o_proj"
    tensors = weights(base)
    tensors[f"{name}.weight"][5] = 0
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    made = peft({name: (random(RANK, 64), torch.zeros(64, RANK))}) | {f"{PREFIX}{name}.lora_magnitude_vector": random(64).abs()}
    with pytest.raises(EffllmError, match="rescales a row of zeros in 'model.layers.0.self_attn.o_proj.weight'"):
        opened(base, adapter(tmp_path / "own", made))


def test_of_parts_of_a_matrix_each_has_lengths_or_none(tmp_path: Path) -> None:
    """Rows of a shard without magnitudes, and of one without an adapter, keep their norms."""
    saved(replace(ALL["olmo_hybrid"], dtype="float32"), base := tmp_path / "base")
    made = load_file(path := lengthened(base, tmp_path / "own") / "adapter_model.safetensors")
    left = {name: each for name, each in made.items()
            if not ("linear_attn.k_proj" in name and "magnitude" in name or "linear_attn.v_proj" in name)}
    assert all(any(part in name for name in made.keys() - left.keys()) for part in ("lora_A", "lora_B", "magnitude"))
    save_file(left, path)
    list(merge(base, path.parent, tmp_path / "out"))
    engine = opened(base, path.parent)
    gains = [each for (_, role), each in engine.prepared.adapters.gains.items() if role == "state_in"]
    assert gains and all(0 < np.count_nonzero(each == 0) < each.size for each in gains)
    assert_near(logits(engine), logits(opened(tmp_path / "out")))
