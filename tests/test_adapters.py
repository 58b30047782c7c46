"""LoRA adapters applied at run time: the same logits as a merged model, whichever tier the weights are on and whatever their format."""

from __future__ import annotations

import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from conversions import options, run
from family_models import CASES, Case
from gpu_runs import card_here, simulated
from lora_adapters import PREFIX, RANK, adapter, peft, random, weights
from more_family_cases import MORE_CASES
from safetensors.torch import save_file
from saved_models import saved
from saved_tokenizers import with_words_of_fable
from streamed_models import streaming

import effllm
from effllm import EffllmError
from effllm.offload.checkpoint import TensorStore
from effllm.quant.weight import Weight, to_f32
from effllm.runtime.adapters.adapter import matching_names
from effllm.runtime.adapters.adapter_targets import target_rows as places_of
from effllm.runtime.adapters.loaded_adapters import BESIDE, load_adapters
from effllm.runtime.adapters.merge import merge
from effllm.runtime.config import read_config
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.gguf.export import export_gguf
from effllm.runtime.planning.forecast import work
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.sampler import Sampler, SamplerSettings
from effllm.runtime.source import open_weights
from effllm.runtime.tensors import check_tensors, typed

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
ALL = {**CASES, **MORE_CASES}
QUICK = ("llama, odd vocabulary", "phi3", "qwen3_5_text", "gemma4_text, mixture", "deepseek_v2", "afmoe", "nemotron", "cohere", "gpt2",
         "gpt_neox", "falcon, two norms, groups, biases, own head, bfloat16", "internlm2")
OTHERS = ("gemma3n_text", "falcon_h1", "lfm2", "granitemoehybrid, experts, bfloat16", "mixtral", "gpt_oss", "qwen3_next", "gemma2",
          "qwen3_vl", "olmo_hybrid", "opt", "llama4_text", "youtu", "granite_swa", "bamba", "falcon", "exaone", "kimi_linear",
          "bailing_hybrid", "flint", "laguna", "mllama, bfloat16", "mamba2", "minimax", "rwkv7", "zamba2", "bloom", "mpt",
          "muse_glimmer")


def of_all_matrices(folder: Path, out: Path, seed: int = 1, size: float = 0.05, **stated: object) -> Path:
    """An adapter for whatever in the files of a model may have one beside it, under the names that its tensors have there."""
    config = read_config(folder)
    store, container = open_weights(folder)
    with store:
        known = places_of(config, check_tensors(config, store, container))
    with TensorStore.open(folder) as files:
        stored = [*files.tensors]
    made = {}
    for name in stored:
        alike = matching_names(known, name) if name.endswith(".weight") and "vis" not in name else []
        shape, own = known[alike[0]] if len(alike) == 1 else ((), [])
        if own and all(place.key[1] in BESIDE for place in own):
            a, b = (size * random(*thin, seed=seed + len(made)) for thin in ((RANK, shape[1]), (shape[0], RANK)))
            made |= peft({name.removesuffix(".weight"): (a, b)})
    return adapter(out, made, lora_alpha=RANK, **stated)


def opened(folder: Path, *own: Path | str, **asked: object) -> Engine:
    *_, engine = open_engine(folder, EngineOptions(**{"device": "cpu", "ctx": 256, "spec": "off", "kv": "32bit"} | asked,
                                                   lora=tuple(map(str, own))))
    return engine


def logits(engine: Engine) -> np.ndarray:
    """Behind a prompt, of single tokens and of a few at once; the engine is closed."""
    ids = np.random.default_rng(3).integers(0, min(engine.config.vocab_size, 256), 160).tolist()
    try:
        list(engine.prefill(ids[:140]))
        found = [engine._logits.copy(), *(engine.forward_logits([token])[0].copy() for token in ids[140:150])]
        return np.stack([*found, *engine.forward_logits(ids[150:156]).copy()])
    finally:
        engine.close()


def assert_near(ours: np.ndarray, theirs: np.ndarray, share: float = 1e-4) -> None:
    assert np.abs(ours - theirs).max() <= share * np.abs(theirs).max()


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_what_is_beside_is_what_merging_makes(name: str, tmp_path: Path) -> None:
    """Every stage of every kind of layer: joined matrices, states, latents, experts beside an MLP, gates of attention."""
    saved(replace(ALL[name], dtype="float32"), tmp_path / "base")
    own = of_all_matrices(tmp_path / "base", tmp_path / "own")
    list(merge(tmp_path / "base", own, tmp_path / "out"))
    made, plain = logits(opened(tmp_path / "out")), logits(opened(tmp_path / "base"))
    assert np.abs(made - plain).max() > 0.02 * np.abs(plain).max(), "the adapter changes nothing that could be seen"
    assert_near(logits(opened(tmp_path / "base", own)), made)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the packaged model."""
    return of_all_matrices(FABLE, tmp_path_factory.mktemp("adapters") / "own")


@pytest.fixture(scope="module")
def low_bit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run(FABLE, out := tmp_path_factory.mktemp("quantized") / "fable", options("4bit"))
    return out


@pytest.fixture(params=["bf16", "4bit"])
def base(request: pytest.FixtureRequest, low_bit: Path) -> Path:
    return FABLE if request.param == "bf16" else low_bit


def test_the_bits_are_the_same_on_any_threads_and_from_the_disk(base: Path, own: Path) -> None:
    expected = logits(opened(base, own, kv="16bit"))
    assert np.array_equal(logits(opened(base, own, kv="16bit", threads=1)), expected)
    assert np.array_equal(logits(streaming(base, ctx=256, spec="off", lora=(str(own),))), expected)


def test_gates_that_are_cut_before_they_gate_have_theirs_from_the_disk_too(tmp_path: Path) -> None:
    """Gemma 3n's, whose gate and what it gates come row by row together where nothing is beside them."""
    saved(ALL["gemma3n_text"], tmp_path / "base")
    own = str(of_all_matrices(tmp_path / "base", tmp_path / "own"))
    expected = logits(opened(tmp_path / "base", own, kv="16bit"))
    assert np.array_equal(logits(streaming(tmp_path / "base", ctx=256, spec="off", lora=(own,))), expected)


def test_low_bit_weights_are_not_touched(low_bit: Path, own: Path, tmp_path: Path) -> None:
    """Beside products that round nothing it is the sum of what the codes mean and of the adapter."""
    apart = load_adapters((str(own),), read_config(low_bit), check_all(low_bit))
    assert apart.rank == RANK and {key[1] for key in apart.weights} == {"q", "k", "v", "o", "gate", "up", "down"}
    opened_up = tmp_path / "opened"
    widen(low_bit, opened_up)
    list(merge(opened_up, own, tmp_path / "merged"))
    assert_near(logits(opened(low_bit, own, exact=True)), logits(opened(tmp_path / "merged")), 3e-4)


def check_all(folder: Path) -> dict:
    store, container = open_weights(folder)
    with store:
        return check_tensors(read_config(folder), store, container)


def widen(folder: Path, out: Path) -> None:
    """What a folder of low-bit weights means, as float32."""
    out.mkdir()
    store, container = open_weights(folder)
    made = {}
    with store:
        for roles in check_tensors(read_config(folder), store, container).values():
            for tensor in roles.values():
                raw = store.read(tensor.info)
                values = (to_f32(typed(raw, tensor.spec), tensor.spec.scheme).reshape(tensor.shape) if tensor.spec.is_raw
                          else Weight.low_bit(tensor.spec, tensor.shape, raw).to_f32())
                made[tensor.name] = torch.from_numpy(np.array(values, np.float32))
    save_file(made, out / "model.safetensors")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FABLE / name, out / name)


def test_a_gguf_file_has_it_beside_rows_in_an_order_of_its_own(own: Path, tmp_path: Path) -> None:
    """Queries and keys of such a file lie otherwise than in the checkpoint that the adapter was made for."""
    list(export_gguf(FABLE, file := tmp_path / "fable.gguf", "F16", "fable"))
    plain, beside = (logits(opened(file, *each, exact=True)) for each in ((), (own,)))
    assert_near(plain, logits(opened(FABLE, exact=True)), 1e-3)
    assert_near(beside, logits(opened(FABLE, own, exact=True)), 1e-3)
    assert np.abs(beside - plain).max() > 0.1 * np.abs(plain).max()


def test_drafts_and_passes_that_come_again_write_the_same(own: Path) -> None:
    """A list of jobs that is run again holds the adapter's; so does a pass that verifies drafts."""
    ids = np.random.default_rng(3).integers(0, 256, 24).tolist() * 4
    texts = []
    for spec in ("off", "lookup"):
        engine = opened(FABLE, own, spec=spec, kv="16bit")
        list(engine.prefill(ids))
        sampler = Sampler(SamplerSettings(temperature=0.0), engine.config.vocab_size)
        texts.append([step.token for step in engine.generate(sampler, 40, frozenset())])
        drafted = engine.speculation is not None and engine.speculation.counts.drafted
        engine.close()
    assert texts[0] == texts[1] and drafted


def test_layers_on_a_gpu_have_their_adapters_there(own: Path) -> None:
    """All of them, and the last ones, whose adapters the plan counts; prompts that copy layers included."""
    expected = logits(opened(FABLE, own, exact=True))
    for layers in (2, 6):
        with card_here(simulated()):
            engine = opened(FABLE, own, device="auto", gpu_layers=layers, exact=True)
        assert engine.placement.devices.count("cuda") == layers
        assert_near(logits(engine), expected)


def test_several_are_their_sum_and_a_scale_is_a_share(tmp_path: Path) -> None:
    saved(Case("llama"), base := tmp_path / "base")
    first, second = (of_all_matrices(base, tmp_path / name, seed) for name, seed in (("a", 1), ("b", 50)))
    list(merge(base, first, tmp_path / "one"))
    list(merge(tmp_path / "one", second, tmp_path / "both"))
    assert_near(logits(opened(base, first, second)), logits(opened(tmp_path / "both")))
    half = of_all_matrices(base, tmp_path / "half", 1, alpha_pattern={".*": RANK / 2})
    list(merge(base, half, tmp_path / "halved"))
    assert_near(logits(opened(base, f"{first}:0.5")), logits(opened(tmp_path / "halved")))
    assert np.array_equal(logits(opened(base, f"{first}:0")), logits(opened(base)))


def test_it_is_kept_as_narrow_as_loses_nothing(tmp_path: Path) -> None:
    saved(Case("llama"), base := tmp_path / "base")
    a, b = random(RANK, 64), random(64, RANK)
    pairs = {"model.layers.0.self_attn.o_proj": (a.bfloat16(), b.half())}
    own = adapter(tmp_path / "own", peft(pairs), lora_alpha=2 * RANK)
    made = load_adapters((str(own), ), read_config(base), check_all(base))
    (added,), = made.weights.values()
    assert (added.into.scheme, added.out.scheme) == ("bf16", "f16") and made.nbytes == 2 * 2 * 64 * RANK
    assert np.array_equal(added.out.to_f32(), 2 * b.half().float().numpy())
    third = load_adapters((f"{own}:0.3",), read_config(base), check_all(base))  # a share is multiplied as it runs
    assert third.weights[0, "o"][0].out.scheme == "f16" and third.digest != made.digest
    wide = load_adapters((str(adapter(tmp_path / "wide", peft(pairs), lora_alpha=0.3)),), read_config(base), check_all(base))
    assert wide.weights[0, "o"][0].out.scheme == "f32"


def test_a_plan_counts_it(own: Path) -> None:
    found = [prepare(FABLE, EngineOptions(device="cpu", ctx=256, lora=lora)) for lora in ((), (str(own),))]
    tokens = []
    for each in found:
        tokens.append(work(each, check_tensors(each.config, each.store, each.container)).bytes_per_token)
        each.store.close()
    assert tokens[1] - tokens[0] == found[1].adapters.nbytes == 4 * found[1].adapters.products_of((1.0,)), "a token reads it, floats"
    workspace = [each.placement.workspace_bytes for each in found]
    assert workspace[1] > workspace[0] and found[1].adapters.nbytes > 0 == found[0].adapters.nbytes


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    saved(Case("mixtral"), tmp_path / "mixture")
    return tmp_path / "mixture"


@pytest.mark.parametrize(("change", "expected"), [
    (lambda made: {f"{PREFIX}lm_head.weight": random(300, 64)}, "replaces 'lm_head.weight' entirely"),
    (lambda made: {f"{PREFIX}lm_head.lora_A.weight": random(4, 64), f"{PREFIX}lm_head.lora_B.weight": random(300, 4)},
     "changes 'lm_head.weight', which adapters cannot change"),
    (lambda made: made | {f"{PREFIX}model.layers.0.self_attn.q_proj.lora_magnitude_vector": random(63)}, "but the model has"),
    (lambda made: {name: each[:, :-1] if "lora_A" in name else each for name, each in made.items()}, "but the model has"),
    (lambda made: {name.replace("layers.0", "layers.7"): each for name, each in made.items()}, "which the model does not have"),
    (lambda made: {name: math.nan * each for name, each in made.items()}, "NaN or infinity")])
def test_what_only_merging_can_do_is_refused(tmp_path: Path, change, expected: str) -> None:
    saved(Case("llama", {"tie_word_embeddings": False}), base := tmp_path / "base")
    made = peft({"model.layers.0.self_attn.q_proj": (random(4, 64), random(64, 4))})
    with pytest.raises(EffllmError) as refused:
        opened(base, adapter(tmp_path / "own", change(made)))
    assert expected in refused.value.message and "\n" not in refused.value.message


def test_experts_are_refused(mixture: Path, tmp_path: Path) -> None:
    name = "model.layers.0.block_sparse_moe.experts.0.w1"
    rows, columns = weights(mixture)[f"{name}.weight"].shape
    with pytest.raises(EffllmError, match="which adapters cannot change") as refused:
        opened(mixture, adapter(tmp_path / "own", peft({name: (random(4, columns), random(rows, 4))})))
    assert "effllm export" in refused.value.hint


def test_a_scale_is_a_number(own: Path) -> None:
    with pytest.raises(EffllmError, match="inf is not a scale"):
        opened(FABLE, f"{own}:inf")
    with pytest.raises(EffllmError, match="does not exist"):
        opened(FABLE, f"{own}:half")
    with pytest.raises(EffllmError, match="does not exist"):
        opened(FABLE, "~nobody-of-this-name/own:0.5")


def test_a_model_that_drafts_has_none_of_it(own: Path, tmp_path: Path) -> None:
    """It is of another shape as a rule, and guesses by itself."""
    saved(Case("llama", {"vocab_size": 4096}), tmp_path / "small")
    with_words_of_fable(tmp_path / "small")
    engine = opened(FABLE, own, draft=str(tmp_path / "small"), spec="auto")
    assert engine.prepared.adapters.names == ("own",) and engine.prepared.speculation.draft.adapters.names == ()
    engine.close()


def test_it_may_be_wider_than_the_model(tmp_path: Path) -> None:
    saved(Case("llama"), base := tmp_path / "base")
    name = "model.layers.0.self_attn.o_proj"
    own = adapter(tmp_path / "own", peft({name: (0.05 * random(700, 64), 0.05 * random(64, 700))}), lora_alpha=RANK)
    list(merge(base, own, tmp_path / "out"))
    assert_near(logits(opened(base, own)), logits(opened(tmp_path / "out")))


def test_from_the_command_line(user, tmp_path: Path, own: Path) -> None:
    """The text of the merged model, in a run, from a plan, and in a conversation that is not taken for another's."""
    list(merge(FABLE, own, tmp_path / "out"))
    asked = ("Once upon a time", "--raw", "-n", "12", "--temp", "0", "--kv", "32bit")
    beside, merged, plain = (user.run("run", *words, *asked) for words in (("fable", "--lora", own), (tmp_path / "out",), ("fable",)))
    assert beside.code == 0 and beside.out == merged.out != plain.out
    shown = user.run("plan", "fable", "--lora", own, "--no-probe")
    assert f"own: beside 42 matrices, rank {RANK}" in shown.out
    first = user.run("run", "fable", "Once", "-n", "4", "--session", "tale", "--lora", own)
    other = user.run("run", "fable", "And", "-n", "4", "--session", "tale")
    assert first.code == 0 and other.code == 2 and "was saved with another --lora, or none" in other.err
    assert user.run("run", "fable", "And", "-n", "4", "--session", "tale", "--lora", own).code == 0
    assert user.run("run", "fable", "Once", "-n", "4", "--session", "plain").code == 0
    other = user.run("run", "fable", "And", "-n", "4", "--session", "plain", "--lora", own)
    assert other.code == 2 and "was saved with another --lora, or none" in other.err
    refused = user.run("serve", "--lora", own)
    assert refused.code == 2 and "--lora is for a server of one model" in refused.err


def as_gguf(own: Path, out: Path, heads: int = 4, kv_heads: int = 2, **stated: object) -> Path:
    """What llama.cpp's converter makes of an adapter of PEFT for a model of llama's architecture."""
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
             "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
    writer = gguf.GGUFWriter(out, stated.pop("architecture", "llama"))
    writer.add_type(stated.pop("kind", "adapter"))
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 2.0 * RANK)
    for name, tensor in weights(own).items():
        layer, module, part = re.fullmatch(r".*layers\.(\d+)\.(.*)\.lora_([AB])\.weight", name).groups()
        values, within = tensor.numpy(), {"self_attn.q_proj": heads, "self_attn.k_proj": kv_heads}.get(module)
        if part == "B" and within:
            values = values.reshape(within, 2, -1, RANK).swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(f"blk.{layer}.{names[module]}.weight.lora_{part.lower()}", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


@pytest.fixture(scope="module")
def doubled(own: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`own` with twice its scale, as a GGUF file."""
    return as_gguf(own, tmp_path_factory.mktemp("file") / "own.gguf")


def test_a_gguf_file_is_the_adapter_that_it_was_made_of(own: Path, doubled: Path) -> None:
    assert_near(logits(opened(FABLE, f"{doubled}:0.5")), logits(opened(FABLE, own)), 1e-5)


def test_a_gguf_file_of_something_else_is_refused(own: Path, tmp_path: Path) -> None:
    for stated, expected in (({"kind": "model"}, "is not a LoRA adapter but 'model'"),
                             ({"architecture": "qwen2"}, "is an adapter for 'qwen2'"),
                             ({"architecture": "nosuch"}, "which is not supported")):
        with pytest.raises(EffllmError, match=expected):
            opened(FABLE, as_gguf(own, tmp_path / "other.gguf", **stated))
    saved(Case("llama"), tmp_path / "base")
    with pytest.raises(EffllmError, match="with matrices of|which adapters cannot change"):
        opened(tmp_path / "base", as_gguf(own, tmp_path / "other.gguf"))


@pytest.mark.peer
@pytest.mark.slow
def test_llama_cpp_adds_the_same(doubled: Path, tmp_path: Path) -> None:
    """To the same file, with the same adapter."""
    peer = pytest.importorskip("llama_cpp")
    list(export_gguf(FABLE, file := tmp_path / "fable.gguf", "F16", "fable"))
    ids = np.random.default_rng(3).integers(3, 256, 40).tolist()
    theirs = peer.Llama(str(file), lora_path=str(doubled), n_ctx=256, logits_all=True, verbose=False)
    theirs.eval(ids)
    found = np.array(theirs.scores[: len(ids)])
    engine = opened(file, doubled)
    ours = np.concatenate([each.copy() for _, each in engine.score(ids)])
    engine.close()
    plain = opened(file)
    without = np.concatenate([each.copy() for _, each in plain.score(ids)])
    plain.close()
    assert np.abs(ours - found).max() < 0.02 * np.abs(without - found).max()
