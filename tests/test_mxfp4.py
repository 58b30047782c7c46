"""gpt-oss checkpoints in MXFP4: the meaning of their codes, experts split, whole models against transformers, which dequantizes them."""

import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from config_samples import LLAMA, refused
from conversions import FABLE, options, run
from family_models import CASES, oracle, text, written
from safetensors.torch import load_file, save_file
from saved_models import saved
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, Mxfp4Config, PreTrainedModel

from effllm import UsageError
from effllm.cli.app import main
from effllm.cli.environment import Environment
from effllm.kernels.cpu.candidates import default_registry
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.cuda.torch_ops import TorchOps
from effllm.kernels.threads import ThreadPool
from effllm.offload.checkpoint import CheckpointError, TensorStore
from effllm.quant.imports import mxfp4
from effllm.quant.weight import Weight, to_f32
from effllm.runtime.config import read_config
from effllm.runtime.conversion.compressed_tensors import export_compressed
from effllm.runtime.conversion.convert_plan import plan_conversion
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.events import Notice
from effllm.runtime.library.local_model import local_model
from effllm.runtime.planning.needed_kernels import Needs, kernel_kinds
from effllm.runtime.planning.plan_request import LOGIT_ROWS
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.sampler import Sampler, SamplerSettings
from effllm.runtime.source import is_low_bit, open_store
from effllm.runtime.stores.container import check_stored, read_container
from effllm.runtime.workspace_dims import dims

EXPERTS, HIDDEN, WIDTH, LAYERS = 5, 64, 96, 3
SHAPES = {"gate_up_proj": (2 * WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}
SECTION = {"modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
           "quant_method": "mxfp4"}
CONFIG = {"vocab_size": 300, "hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
          "num_key_value_heads": 2, "head_dim": 32, "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "sliding_window": 40,
          "max_position_embeddings": 512, "initializer_range": 0.3, "eos_token_id": None}
UP = "model.layers.1.mlp.experts.gate_up_proj"
CTX = 256


def meaning(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """uint8 [..., N, G, 16] and [..., N, G] -> float32 [..., N, 32 G], bit by bit: a sign, two bits of exponent, one of mantissa."""
    codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(*blocks.shape[:-1], 32).astype(int)
    sign, exponent, mantissa = 1 - 2 * (codes >> 3), codes >> 1 & 3, codes & 1
    values = np.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent - 1))
    wide = sign * values * 2.0 ** (scales[..., None].astype(float) - 127)
    return wide.reshape(*blocks.shape[:-2], -1).astype(np.float32)


def packed_model(folder: Path) -> dict[str, torch.Tensor]:
    """A random checkpoint as published, in two files, in float32 beside its MXFP4; returns its tensors."""
    torch.manual_seed(4)
    config = GptOssConfig(**CONFIG)
    model, rng = GptOssForCausalLM(config), np.random.default_rng(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for layer in range(LAYERS):
        for part, (n, k) in SHAPES.items():
            name = f"model.layers.{layer}.mlp.experts.{part}"
            del tensors[name]
            tensors[f"{name}_blocks"] = torch.from_numpy(rng.integers(0, 256, (EXPERTS, n, k // 32, 16), np.uint8))
            tensors[f"{name}_scales"] = torch.from_numpy(rng.integers(121, 126, (EXPERTS, n, k // 32), np.uint8))
    folder.mkdir(exist_ok=True)
    split = {file: {name: tensor for i, (name, tensor) in enumerate(sorted(tensors.items())) if i % 2 == file} for file in (0, 1)}
    for file, part in split.items():  # a weight's codes and its scales may lie in two files
        save_file(part, folder / f"model-{file}.safetensors", {"format": "pt"})
    index = {name: f"model-{file}.safetensors" for file, part in split.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    raw = json.loads(config.to_json_string()) | {"architectures": ["GptOssForCausalLM"], "quantization_config": SECTION}
    (folder / "config.json").write_text(json.dumps(raw))
    return tensors


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("gpt") / "oss"
    return folder, packed_model(folder)


@pytest.fixture(scope="module")
def theirs(checkpoint: tuple[Path, dict[str, torch.Tensor]]) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(checkpoint[0], dtype=torch.float32, attn_implementation="eager",
                                                 quantization_config=Mxfp4Config(dequantize=True))
    return model.eval()


def opened(folder: Path, **more: object) -> tuple[Engine, list[str]]:
    *said, engine = open_engine(folder, EngineOptions(**{"device": "cpu", "kv": "32bit", "ctx": CTX, "strict": True, "chunk": 128, **more}))
    return engine, [item.text for item in said if isinstance(item, Notice)]


def scores(engine: Engine, ids: list[int]) -> np.ndarray:
    try:
        return np.concatenate([part.copy() for _, part in engine.score(ids)])
    finally:
        engine.close()


# ---- what it means


def test_every_code_under_every_scale() -> None:
    """To the last bit, and in bfloat16 nothing is lost."""
    scales = np.arange(255, dtype=np.uint8)[:, None]
    blocks = np.tile(np.arange(0, 256, 16, dtype=np.uint8) | np.arange(16, dtype=np.uint8)[::-1], (255, 1))[:, None]
    ours = mxfp4.dequantize(mxfp4.unpack_pairs(blocks).reshape(255, 32), scales)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(ours, meaning(blocks, scales))
    assert set(np.unique(np.abs(ours[127])).tolist()) == {0, 0.5, 1, 1.5, 2, 3, 4, 6}
    np.testing.assert_array_equal(ours.view(np.uint32) & 0xFFFF, 0)
    with pytest.raises(ValueError, match="NaN"):
        mxfp4.dequantize(np.zeros((1, 32), np.uint8), np.array([[255]], np.uint8))
    with pytest.raises(ValueError, match="scales"):
        mxfp4.dequantize(np.zeros((1, 64), np.uint8), np.array([[1]], np.uint8))


def expected(tensors: dict[str, torch.Tensor], layer: int, expert: int, part: str) -> np.ndarray:
    joint, place = ("down_proj", slice(None)) if part == "down_proj" else ("gate_up_proj", slice(part == "up_proj", None, 2))
    name = f"model.layers.{layer}.mlp.experts.{joint}"
    return meaning(*(tensors[f"{name}_{kind}"].numpy()[expert] for kind in ("blocks", "scales")))[place]


@pytest.mark.parametrize("low_bit", [False, True])
def test_experts_come_one_by_one_and_exactly(checkpoint: tuple[Path, dict[str, torch.Tensor]], low_bit: bool) -> None:
    folder, tensors = checkpoint
    with open_store(folder, low_bit=low_bit) as store:
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                for part in ("gate_proj", "up_proj", "down_proj"):
                    name = f"model.layers.{layer}.mlp.experts.{expert}.{part}"
                    info, values = store.tensors[f"{name}.weight"], expected(tensors, layer, expert, part)
                    raw = store.read(info)
                    if low_bit:
                        stored = store.container.tensors[info.name]
                        assert str(stored.spec) == "mxfp4:32" and stored.shape == values.shape
                        np.testing.assert_array_equal(Weight.low_bit(stored.spec, stored.shape, raw).to_f32(), values)
                    else:
                        assert (info.dtype, info.shape) == ("BF16", values.shape)
                        np.testing.assert_array_equal(to_f32(raw.view(np.uint16), "bf16").reshape(values.shape), values)
                        np.testing.assert_array_equal(to_f32(store.read(info, 3, 40).view(np.uint16), "bf16"), values[3:40].reshape(-1))
                    bias, joint = store.tensors[f"{name}.bias"], "down_proj" if part == "down_proj" else "gate_up_proj"
                    whole = tensors[f"model.layers.{layer}.mlp.experts.{joint}_bias"][expert].numpy()
                    whole = whole if part == "down_proj" else whole[part == "up_proj" :: 2]
                    np.testing.assert_array_equal(store.read(bias).view(np.float32), whole)
                    np.testing.assert_array_equal(store.read(bias, 5, 9).view(np.float32), whole[5:9])


def test_sixteen_bit_experts_lie_the_other_way_round(tmp_path: Path) -> None:
    model = written(CASES["gpt_oss, bfloat16"], tmp_path)
    with open_store(tmp_path) as store:
        experts = model.model.layers[2].mlp.experts
        joint, down = (each.detach().numpy() for each in (experts.gate_up_proj, experts.down_proj))
        for expert in (4, 0, 1):
            parts = {"gate_proj": joint[expert, :, ::2].T, "up_proj": joint[expert, :, 1::2].T, "down_proj": down[expert].T}
            for part, values in parts.items():
                info = store.tensors[f"model.layers.2.mlp.experts.{expert}.{part}.weight"]
                assert (info.dtype, info.shape) == ("BF16", values.shape)
                np.testing.assert_array_equal(to_f32(store.read(info).view(np.uint16), "bf16").reshape(values.shape), values)
                np.testing.assert_array_equal(to_f32(store.read(info, 7, 30).view(np.uint16), "bf16"), values[7:30].reshape(-1))
        assert store.notices == ()


# ---- whole models


@pytest.mark.parametrize("chunk", [128, 256])
def test_logits_are_those_of_transformers(checkpoint: tuple[Path, object], theirs: PreTrainedModel, chunk: int) -> None:
    """With float32 activations to 1e-4, else as near as eight bits of them come."""
    for length in (1, 7, 190):
        ids = text(theirs, length)
        want = oracle(theirs, ids)
        exact = scores(opened(checkpoint[0], exact=True, chunk=chunk)[0], ids)
        assert np.abs(exact - want).max() <= 1e-4 * np.abs(want).max()
        fast = scores(opened(checkpoint[0], chunk=chunk)[0], ids)
        assert np.square(fast - want).sum() < 2e-2 * np.square(want).sum() and not np.array_equal(fast, exact)


def test_sinks_join_the_softmax_over_packed_pages_too(checkpoint: tuple[Path, object], theirs: PreTrainedModel) -> None:
    """Pages of eight bits are behind a window of 40 in some layers and are all read in the others."""
    ids = text(theirs, 500)
    want = oracle(theirs, ids)
    engine, _ = opened(checkpoint[0], exact=True, kv="8bit", ctx=512)
    assert engine.cache is not None and np.square(scores(engine, ids) - want).sum() < 1e-2 * np.square(want).sum()


def test_greedy_tokens_are_those_of_transformers(checkpoint: tuple[Path, object], theirs: PreTrainedModel) -> None:
    engine, _ = opened(checkpoint[0], exact=True)
    ids = text(theirs, 180)
    try:
        list(engine.prefill(ids))
        tokens = [step.token for step in engine.generate(Sampler(SamplerSettings(temperature=0), 300), 40, frozenset())]
    finally:
        engine.close()
    assert oracle(theirs, ids + tokens)[len(ids) - 1 : -1].argmax(-1).tolist() == tokens


def test_the_other_backend_takes_them_widened(checkpoint: tuple[Path, object], theirs: PreTrainedModel) -> None:
    folder, ids = checkpoint[0], text(theirs, 120)
    config = read_config(folder)
    asked = EngineOptions(device="cpu", kv="32bit", ctx=CTX)
    prepared = prepare(folder, asked)
    prepared.store.close()
    store = open_store(folder)
    host = CpuOps(ThreadPool(1), dims(config, CTX, prepared.shape.chunk, LOGIT_ROWS), default_registry(exact=True))
    placed = replace(prepared, store=store, container=None, placement=replace(prepared.placement, devices=("cuda", "cpu", "cuda")))
    engine = Engine(placed, {"cpu": host, "cuda": TorchOps("cpu")})
    list(engine.model.load())
    want = oracle(theirs, ids)
    assert np.abs(scores(engine, ids) - want).max() <= 1e-4 * np.abs(want).max()


def test_what_is_reported_and_counted(checkpoint: tuple[Path, object]) -> None:
    folder = checkpoint[0]
    engine, said = opened(folder)
    experts = 3 * EXPERTS * LAYERS
    assert any(f"{experts} MXFP4 weights are repacked for the kernels" in line for line in said)
    low = [tensor for roles in engine.model.tensors.values() for role, tensor in roles.items() if not tensor.spec.is_raw]
    assert len(low) == experts and {str(tensor.spec) for tensor in low} == {"mxfp4:32"}
    assert engine.model.bytes_per_pass < engine.model.nbytes
    engine.close()
    assert is_low_bit(folder) and not is_low_bit(folder, False) and "low-bit" in kernel_kinds(Needs(True), EngineOptions())
    assert read_config(folder, strict=True).expert_format == "mxfp4:32"
    with pytest.raises(UsageError, match="--load mmap"):
        prepare(folder, EngineOptions(device="cpu", load="mmap"))
    with open_store(folder) as store:
        assert "widened to bf16" in store.notices[0]


@pytest.fixture(params=["mxfp4", "bfloat16"])
def source(request: pytest.FixtureRequest, checkpoint: tuple[Path, object], tmp_path: Path) -> Iterator[Path]:
    folder = checkpoint[0]
    if request.param == "bfloat16":
        folder = tmp_path / "wide"
        saved(CASES["gpt_oss, bfloat16"], folder)
    yield folder


def test_they_are_quantized(source: Path, tmp_path: Path) -> None:
    """Experts one record each, biases and sinks as they were, nothing left out; the answer stays near."""
    ids = np.random.default_rng(1).integers(0, 300, 100).tolist()
    before = scores(opened(source, exact=True)[0], ids)
    errors = []
    for spec in ("8bit", "4bit"):
        made, said = run(source, tmp_path / spec, options(spec))
        assert not [line for line in said if line.startswith("left out")]
        rows = {row.size.name: row.size for row in made.classes}
        assert rows["gate"].tensors == rows["up"].tensors == rows["down"].tensors == EXPERTS * LAYERS
        packed = source.name == "oss"
        assert rows["gate"].specs == (("mxfp4:32",) if packed else (str(options(spec).recipe.base),))
        assert any("stay in mxfp4:32" in line for line in said) == packed
        engine, _ = opened(tmp_path / spec, exact=True)
        kept = {role for role, tensor in engine.model.tensors[0].items() if tensor.spec.is_raw}
        assert {"sinks", "router", "router_bias", "q_bias", "experts.0.gate_bias", "experts.4.down_bias"} <= kept
        after = scores(engine, ids)
        errors.append(np.square(after - before).sum() / np.square(before).sum())
    assert 3 * errors[0] < errors[1] < 1.0


def test_published_codes_are_kept_bit_for_bit_unless_asked_for(checkpoint: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    folder, tensors = checkpoint
    run(folder, tmp_path / "kept", options("4bit", rules=[r"layers\.2\..*experts\.3\.=8bit"]))
    made = read_container(tmp_path / "kept")
    experts = {name: stored for name, stored in made.tensors.items() if ".experts." in name and name.endswith("weight")}
    assert {str(stored.spec) for name, stored in experts.items() if "layers.2.mlp.experts.3." in name} == {"symmetric8:32"}
    with TensorStore.open(tmp_path / "kept") as store:
        check_stored(made, store)
        for name, stored in experts.items():
            raw, (_, _, layer, _, _, expert, part, _) = store.read(store.tensors[name]), name.split(".")
            assert zlib.crc32(raw) == stored.crc32
            if "layers.2.mlp.experts.3." not in name:
                assert str(stored.spec) == "mxfp4:32" and stored.error_db is None
                values = Weight.low_bit(stored.spec, stored.shape, raw).to_f32()
                np.testing.assert_array_equal(values, expected(tensors, int(layer), int(expert), part))
    made, said = run(folder, tmp_path / "less", options("3bit"))
    assert {row.size.name: row.size.specs for row in made.classes}["gate"] == ("codebook3:16",) and not any("stay in" in s for s in said)
    with plan_conversion(folder, options("4bit").recipe, keep=False).store as store:  # as for --target, which measures other formats
        assert not any(info.dtype == "U8" for info in store.tensors.values())
    with pytest.raises(UsageError, match="gpt_oss"):
        list(export_compressed(folder, tmp_path / "out", "INT4"))


def test_calibration_sees_the_experts(checkpoint: tuple[Path, object], tmp_path: Path) -> None:
    folder = with_tokenizer(checkpoint[0], tmp_path / "m")
    made, _ = run(folder, tmp_path / "out", options("3bit", method="gptq", calibration_tokens=2048))
    assert {row.size.name for row in made.classes} >= {"gate", "up", "down", "q", "head"}
    engine, _ = opened(tmp_path / "out")
    assert np.isfinite(scores(engine, [5, 6, 7])).all()


def test_the_tool_shows_lists_plans_and_runs_them(checkpoint: tuple[Path, object], tmp_path: Path) -> None:
    folder = with_tokenizer(checkpoint[0], tmp_path / "m")
    env = {"HOME": str(tmp_path), "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))}

    def types(*words: str) -> str:
        out, err = StringIO(), StringIO()
        assert main(list(words), Environment(stdin=StringIO(), stdout=out, stderr=err, variables=env)) == 0, err.getvalue()
        return out.getvalue()

    shown = json.loads(types("show", str(folder), "--json"))
    assert shown["stored"] == ["F32", "mxfp4:32"] and shown["experts"]["count"] == EXPERTS and shown["quantized"]["spec"] == "mxfp4:32"
    assert json.loads(types("plan", str(folder), "--json"))["weights_bytes"] == shown["size_bytes"]
    said = json.loads(types("run", str(folder), "Once", "--raw", "-n", "3", "--temp", "0", "--json", "-c", "128"))
    assert said["usage"]["completion_tokens"] == 3
    model = local_model("m", folder)
    assert model.params == shown["parameters"]


def with_tokenizer(source: Path, folder: Path) -> Path:
    """The checkpoint with the packaged model's tokenizer, and as many embeddings."""
    folder.mkdir()
    for path in source.iterdir():
        if path.name != "config.json":
            (folder / path.name).symlink_to(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).symlink_to(FABLE / name)
    raw, vocab = json.loads((source / "config.json").read_text()), json.loads((FABLE / "config.json").read_text())["vocab_size"]
    (folder / "config.json").write_text(json.dumps(raw | {"vocab_size": vocab}))
    tensors = {name: torch.randn(vocab, HIDDEN) * 0.3 for name in ("model.embed_tokens.weight", "lm_head.weight")}
    for file in (0, 1):
        path = folder / f"model-{file}.safetensors"
        own = load_file(path)
        path.unlink()
        save_file({name: tensors.get(name, tensor) for name, tensor in own.items()}, path)
    return folder


# ---- what is refused


def test_damage_is_named(checkpoint: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    folder, tensors = checkpoint
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    bad = tensors[f"{UP}_scales"].clone()
    bad[1, 2, 0] = 255
    for change, word in (({f"{UP}_scales": None}, "without scales"), ({f"{UP}_blocks": None}, "without gate_up_proj_blocks"),
                         ({f"{UP}_scales": bad}, "NaN"), ({f"{UP}_blocks": tensors[f"{UP}_blocks"].short()}, "I16"),
                         ({f"{UP}_bias": torch.zeros(5000, 2)}, "5000 experts"), ({f"{UP}_bias": torch.zeros(EXPERTS, 7)}, "7 outputs"),
                         ({f"{UP}_scales": tensors[f"{UP}_scales"][:, :-1].clone()}, "without scales")):
        changed = {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}
        save_file(changed, tmp_path / "model.safetensors")
        for low_bit in (True, False):
            with pytest.raises(CheckpointError, match=word), open_store(tmp_path, low_bit=low_bit) as store:
                for info in store.tensors.values():
                    store.read(info)


def test_other_formats_and_other_families_are_refused() -> None:
    raw = {**LLAMA, "model_type": "gpt_oss", "num_local_experts": 4}
    refused({**raw, "quantization_config": {"quant_method": "awq", "bits": 4}}, "'awq'", "gpt_oss")
    refused({**LLAMA, "quantization_config": {"quant_method": "mxfp4"}}, "'mxfp4'")
    refused({**raw, "swiglu_limit": 5.0}, "swiglu_limit")
    refused({**raw, "hidden_act": "gelu"}, "hidden_act")
    with pytest.raises(UsageError, match="other tools"):
        options("mxfp4:32")
