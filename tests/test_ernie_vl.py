"""ERNIE 4.5 VL: text tokens use one set of experts, images and the text next to them another, on every backend, in every format and
independent of chunking; transformers is the oracle."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from config_samples import SMALL, refused
from conversions import options, run
from family_models import assert_close
from hub_user import HubUser
from streamed_models import paging
from transformers import PreTrainedModel
from vision_cases import CASES
from vision_models import FIRST, PICTURES, save_vision_model

from effllm import UsageError
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.cuda.torch_ops import TorchOps
from effllm.kernels.threads import ThreadPool
from effllm.offload.checkpoint import TensorStore
from effllm.runtime.config import parse_config, read_config
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.families import VISION_PREFIX, expert_of
from effllm.runtime.images.media import open_media
from effllm.runtime.images.media_markers import media_marker
from effllm.runtime.images.mrope import FIRST_MEDIA_ID, section_axes
from effllm.runtime.planning.plan_request import LOGIT_ROWS
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.sampler import Sampler, SamplerSettings
from effllm.runtime.templates.prompt_builder import PromptBuilder
from effllm.runtime.tokenizer import Tokenizer
from effllm.runtime.workspace_dims import dims

# What training said, in the first configs.
PUBLISHED = {"architectures": ["Ernie4_5_VLMoeForConditionalGeneration"], "auto_map": {
    "AutoConfig": "configuration_ernie4_5_vl.Ernie4_5_VLMoEConfig"}, "freq_allocation": 20, "im_patch_id": FIRST, "model_type":
    "ernie4_5_moe_vl", "modality_detach": False, "moe_capacity": [128, 128, 128], "moe_gate": "topk", "moe_layer_interval": 1,
    "moe_use_aux_free": True, "pixel_hidden_size": 1280, "rope_3d": True, "spatial_conv_size": 2, "temporal_conv_size": 2,
    "use_rmsnorm": True, "use_temporal_conv": True}
FAMILY = "ernie4_5_vl_moe"
TEXT, TOWER, *REST = CASES[FAMILY]
CASE = ({**TEXT, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "moe_intermediate_size": [64, 32],
         "rope_parameters": {**TEXT["rope_parameters"], "mrope_section": [6, 6, 4]}, "eos_token_id": 4},
        {**TOWER, "intermediate_size": 96}, *REST)
OPTIONS = EngineOptions(kv="32bit", device="cpu", ctx=512, strict=True, exact=True)
PROMPT = ("It is so, said the fox, and so it was in the wood. " * 6 + "<|IMAGE_START|>{}<|IMAGE_END|> was a fox in the wood and "
          "<|IMAGE_START|>{}<|IMAGE_END|> a river. Who is there, said the fox?")


class Made(NamedTuple):
    folder: Path
    model: PreTrainedModel
    ids: list[int]
    logits: np.ndarray


def told(model: PreTrainedModel, ids: list[int], ready: dict) -> dict:
    """transformers' inputs for our ids."""
    words = torch.tensor([[FIRST if token >= FIRST_MEDIA_ID else token for token in ids]])
    around = torch.tensor([FIRST, FIRST + 1, FIRST + 2])
    return {"input_ids": words, "mm_token_type_ids": (words == FIRST).int(),
            "moe_mm_token_type_ids": torch.isin(words, around).int(), **ready}


def ids_of(engine: Engine, folder: Path) -> list[int]:
    engine.media = open_media(folder, engine.config)
    prompts = PromptBuilder(Tokenizer.load(folder, engine.config), media=engine.media)
    prompt = PROMPT.format(*(media_marker(engine.media.add(PICTURES[name]).digest) for name in ("tall", "wide")))
    list(prompts.encode_media(prompt, engine, lambda: False))
    return prompts.tokenize(prompt)


def opened(folder: Path, **asked: object) -> Engine:
    return list(open_engine(folder, replace(OPTIONS, **asked)))[-1]


def scored(engine: Engine, folder: Path, **how: object) -> np.ndarray:
    """Logits of the prompt; the engine is closed."""
    try:
        return np.concatenate([logits.copy() for _, logits in engine.score(ids_of(engine, folder), **how)])
    finally:
        engine.close()


@pytest.fixture(scope="module")
def ready() -> dict:
    return dict(REST[-1]([PICTURES["tall"], PICTURES["wide"]], input_data_format="channels_last", return_tensors="pt"))


@pytest.fixture(scope="module")
def made(ready: dict, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    folder = tmp_path_factory.mktemp("ernie") / "model"
    folder.mkdir()
    model = save_vision_model(folder, FAMILY, CASE)
    engine = opened(folder)
    ids = ids_of(engine, folder)
    engine.close()
    with torch.inference_mode():
        return Made(folder, model, ids, model(**told(model, ids, ready), use_cache=False).logits[0].numpy())


@pytest.mark.parametrize("how", [{}, {"pages": 1}, {"by_token": True}], ids=["whole", "in pieces", "by token"])
def test_logits_are_those_of_transformers(made: Made, how: dict) -> None:
    """Chunks end among text and among image tokens; single text tokens are replayed passes."""
    assert_close(scored(opened(made.folder, chunk=128), made.folder, **how), made.logits)


def test_an_answer_continues_by_the_experts_of_words(made: Made, ready: dict) -> None:
    engine = opened(made.folder)
    try:
        ids = ids_of(engine, made.folder)
        list(engine.prefill(ids))
        steps = list(engine.generate(Sampler(SamplerSettings(temperature=0), engine.config.vocab_size), 12, frozenset()))
    finally:
        engine.close()
    with torch.inference_mode():
        wanted = made.model.generate(**told(made.model, ids, ready), max_new_tokens=12, min_new_tokens=12, do_sample=False,
                                     repetition_penalty=1.0)
    assert [step.token for step in steps] == wanted[0][len(ids) :].tolist()


def test_layers_on_a_gpu_have_both_sorts(made: Made) -> None:
    prepared = prepare(made.folder, OPTIONS)
    placement = replace(prepared.placement, devices=("cpu",) + ("cuda",) * (prepared.config.num_hidden_layers - 1))
    host = CpuOps(ThreadPool(1), dims(prepared.config, 512, prepared.shape.chunk, LOGIT_ROWS))
    engine = Engine(replace(prepared, placement=placement), {"cpu": host, "cuda": TorchOps("cpu")})
    list(engine.model.load())
    assert_close(scored(engine, made.folder), made.logits)


def test_experts_of_words_that_are_read_from_the_disk_give_the_same_bits(made: Made) -> None:
    whole = scored(opened(made.folder), made.folder)
    engine = paging(made.folder, 5, kv="32bit", ctx=512, exact=True)
    assert engine.model.pager.stats is not None
    assert np.array_equal(scored(engine, made.folder), whole)


@pytest.mark.parametrize("method", ["rtn", pytest.param("gptq", marks=pytest.mark.slow)])
def test_both_sorts_are_quantized_and_no_router(made: Made, tmp_path: Path, method: str) -> None:
    """A text shows what words are like; experts of images are rounded without one."""
    run(made.folder, tmp_path / "out", options("8bit", method=method))
    engine = opened(tmp_path / "out")
    roles = engine.model.tensors[1]
    low = {role for role, tensor in roles.items() if not tensor.spec.is_raw}
    assert {role for role in roles if role.startswith(f"{VISION_PREFIX}experts.") or expert_of(role) is not None} <= low
    assert low.isdisjoint({"router", f"{VISION_PREFIX}router", "correction", f"{VISION_PREFIX}correction"})
    ours = scored(engine, tmp_path / "out")
    scale = made.logits.std()
    assert 1e-4 < np.abs(ours - made.logits).mean() / scale < 0.1


def test_the_config_that_was_published_first_is_the_same_model(made: Made, tmp_path: Path) -> None:
    """All of the text model in the outer object, numbers of both sorts in lists, and the tower's FFN as so many times its width."""
    folder = shutil.copytree(made.folder, tmp_path / "published")
    raw = json.loads((folder / "config.json").read_text())
    text, tower = raw.pop("text_config"), raw["vision_config"]
    spoken = {key: value for key, value in raw.items() if key.startswith(("image_", "video_"))}
    text = {key: value for key, value in text.items() if key not in ("mlp_layer_types", "model_type", "rope_parameters")}
    (folder / "config.json").write_text(json.dumps({
        **text, **spoken, **PUBLISHED, "moe_num_experts": [5, 5], "moe_layer_start_index": [1, 1], "moe_layer_end_index": [4, 2],
        "rope_scaling": {"type": "default", "mrope_section": [6, 6, 4]}, "rope_theta": 10_000, "vision_config": {
            **{key: tower[key] for key in ("depth", "hidden_act", "hidden_size", "in_channels", "num_heads", "patch_size",
                                           "spatial_merge_size")},
            "attn_sep": True, "embed_dim": 48, "mlp_ratio": 2, "model_type": "DFNRope_vision_transformer"}}))
    ready = json.loads((folder / "preprocessor_config.json").read_text())
    sizes = ready.pop("size")
    (folder / "preprocessor_config.json").write_text(json.dumps({
        **ready, "image_processor_type": "Ernie4_5_VLImageProcessor", "min_pixels": sizes["shortest_edge"],
        "max_pixels": sizes["longest_edge"]}))
    assert np.array_equal(scored(opened(folder), folder), scored(opened(made.folder), made.folder))
    assert parse_config(json.loads((folder / "config.json").read_text()), strict=True).moe == read_config(made.folder).moe


@pytest.mark.parametrize(("key", "value"), [
    ("moe_intermediate_size", "40"), ("moe_intermediate_size", [40]), ("moe_intermediate_size", [40, 0]), ("moe_num_experts", [4, 5]),
    ("mlp_layer_types", ["dense", "moe", "sparse"]), ("use_bias", True), ("moe_k", 6), ("moe_gate", "top2")])
def test_what_it_may_not_have_is_named(key: str, value: object) -> None:
    text = {**SMALL, "model_type": f"{FAMILY}_text", "num_hidden_layers": 3, "moe_num_experts": 5, "moe_k": 2, key: value}
    refused({"model_type": FAMILY, "text_config": text, "vision_config": {}}, "num_experts_per_tok" if key == "moe_k" else key)


def test_what_a_config_does_not_say_is_the_published_model() -> None:
    own = parse_config({"model_type": FAMILY, "text_config": {"model_type": f"{FAMILY}_text"}, "vision_config": {}}, strict=True)
    mixture = own.moe
    assert (mixture.num_experts, mixture.experts_per_token, mixture.expert_dim, mixture.vision_expert_dim,
            mixture.shared_expert_dim) == (64, 6, 1536, 512, 3072)
    assert mixture.layers == frozenset(range(1, 28)) and mixture.vision_token_ids == frozenset(range(101_304, 101_308))
    assert own.rope.theta == 500_000 and own.rope.interleaved and own.tie_word_embeddings and own.vocab_size == 103_424


def test_sections_of_rows_and_columns_that_differ_are_refused(made: Made) -> None:
    config = read_config(made.folder)
    assert section_axes(FAMILY, [6, 6, 4], config, "here").tolist() == [1, 2] * 6 + [0] * 4
    with pytest.raises(UsageError, match="different sizes for rows and columns"):
        section_axes(FAMILY, [4, 6, 6], config, "here")


def test_show_tells_of_both_sorts(made: Made, user: HubUser) -> None:
    said = user.run("show", made.folder).out
    assert "2 of 5 per token, of width 64, in 2 layers, plus a shared one of width 128; as many of width 32 for image tokens" in said


def test_what_a_word_reads_is_without_the_experts_of_images(made: Made) -> None:
    engine = opened(made.folder)
    own = engine.config.moe
    with TensorStore.open(made.folder) as store:
        sizes = [sum(info.nbytes for name, info in store.tensors.items() if f".experts.{number}." in name)
                 for number in range(2 * own.num_experts)]
        rest = sum(info.nbytes for name, info in store.tensors.items()
                   if name.startswith(("model.layers.", "model.embed", "model.norm")) and ".mlp.experts." not in name)
    routers = 2 * len(own.layers) * own.num_experts * 4 * (engine.config.hidden_size + 1) // 2
    assert engine.model.bytes_per_pass == rest - routers + sum(sizes[: own.num_experts]) * own.experts_per_token // own.num_experts
    engine.close()
