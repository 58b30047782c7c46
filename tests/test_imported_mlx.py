"""Folders that MLX quantized: packed here by its description, read as what they mean, run from their codes where kernels can."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))
from family_models import Case
from family_models import written as random_model
from gguf_samples import FABLE, weights
from mlx_checkpoints import CASES, CODES, affine, stream, written
from test_paged_arrivals import QWEN, SLOTS
from test_paged_models import paged, resident

from effllm.offload.checkpoint import CheckpointError
from effllm.quant.imports import mlx
from effllm.quant.weight import Weight, to_f32
from effllm.runtime import families
from effllm.runtime.config import parse_config, read_config
from effllm.runtime.config_reader import ConfigError
from effllm.runtime.engine import EngineOptions, open_engine
from effllm.runtime.events import Notice
from effllm.runtime.library.listing import local_model
from effllm.runtime.source import is_low_bit, open_store, open_weights
from effllm.runtime.stores.expected_formats import expected_formats
from effllm.runtime.stores.import_config import section_of

IDS = [0, 1, 17, 300, 2, 4000, 91, 1234]
UP = "model.layers.1.mlp.up_proj"


def logits_of(folder: Path, **options: object) -> tuple[np.ndarray, list[str]]:
    """Of all of IDS, and what was said when the model was opened."""
    *items, engine = open_engine(folder, EngineOptions(device="cpu", kv="32bit", ctx=64, threads=2, **options))
    logits = engine.forward_logits(IDS).copy()
    engine.close()
    return logits, [item.text for item in items if isinstance(item, Notice)]


@pytest.fixture(scope="module", params=CASES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, dict[str, np.ndarray]]:
    """A case's name, its folder, for reading alone, and what its weights mean."""
    folder = tmp_path_factory.mktemp("mlx") / "m"
    return request.param, folder, written(folder, request.param)


@given(bits=st.sampled_from(mlx.BITS), seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 3), groups=st.integers(1, 4))
@settings(max_examples=40)
def test_a_stream_of_bits_is_its_codes(bits: int, seed: int, rows: int, groups: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (rows, 32 * groups))
    packed = stream(codes, bits).numpy().view(np.uint8).reshape(rows, -1)
    np.testing.assert_array_equal(mlx.codes_of(packed, bits), codes)


@given(depth=st.integers(0, 700), packed=st.integers(0, 300), groups=st.integers(0, 30), affine_=st.booleans())
def test_a_form_is_one_of_mlx_or_none(depth: int, packed: int, groups: int, affine_: bool) -> None:
    form = mlx.form_of(depth, packed, groups, affine_)
    if form is not None:
        assert form.bits * depth == 32 * packed and form.group * groups == depth and (form.mode == "affine") == affine_
        assert form.spec is None or form.spec.bits == form.bits


def test_weights_are_what_they_mean(checkpoint: tuple[str, Path, dict[str, np.ndarray]]) -> None:
    """Codes to the last bit, and whole tensors of them also as they arrive in pieces; what has no such form widened, in any rows."""
    name, folder, meant = checkpoint
    store, container = open_weights(folder)
    with store:
        found = {} if container is None else container.tensors
        assert len(found) == (43 if name in CODES else 0) and is_low_bit(folder) == (name in CODES or "floats" in name)
        for tensor, stored in found.items():
            blob = store.read(store.tensors[tensor])
            assert blob.nbytes == stored.nbytes == store.tensors[tensor].nbytes
            np.testing.assert_array_equal(Weight.low_bit(stored.spec, stored.shape, blob).to_f32(), meant[tensor], err_msg=tensor)
        arrival = store.arrival([store.tensors[f"{UP}.weight"]])
        (piece,), out = arrival.pieces(), np.zeros(arrival.nbytes[0], np.uint8)
        raws = [np.fromfile(each.file, np.uint8, each.nbytes, offset=each.offset) for each in piece.ranges]
        assert sum(raw.nbytes for raw in raws) == arrival.file_nbytes == store.stored_nbytes(store.tensors[f"{UP}.weight"])
        piece.put(raws, [out])
        np.testing.assert_array_equal(out, store.read(store.tensors[f"{UP}.weight"]))
    with open_store(folder, wide="f32") as store:
        for tensor, values in meant.items():
            info = store.tensors[tensor]
            raw = store.read(info, len(values) // 3, len(values))
            np.testing.assert_array_equal(to_f32(raw.view(np.float32), "f32").reshape(-1, *values.shape[1:]), values[len(values) // 3 :])


@pytest.mark.parametrize("checkpoint", ["affine 4", "affine 8", "mxfp8"], indirect=True)
def test_they_run_and_are_announced(tmp_path: Path, checkpoint: tuple[str, Path, dict[str, np.ndarray]]) -> None:
    (name, folder, meant), plain = checkpoint, tmp_path / "plain"
    plain.mkdir()
    save_file({tensor: torch.from_numpy(values) for tensor, values in meant.items()}, plain / "model.safetensors")
    (plain / "config.json").write_bytes((FABLE / "config.json").read_bytes())
    (ours, said), (wanted, _) = logits_of(folder, exact=True), logits_of(plain, exact=True)
    assert any("43 MLX weights of" in text and ("order of the kernels" if name in CODES else "widened to f16") in text for text in said)
    assert np.abs(ours - wanted).max() < (2e-5 if name in CODES else 2e-3) * np.abs(wanted).max()


@pytest.mark.parametrize("checkpoint", ["affine 4", "affine 3"], indirect=True)
def test_a_list_counts_weights_and_not_words(checkpoint: tuple[str, Path, dict[str, np.ndarray]]) -> None:
    name, folder, meant = checkpoint
    facts = local_model("m", folder)
    assert facts.params == sum(values.size for values in meant.values()) and abs(facts.bits - float(name[-1])) < 0.6


@pytest.mark.parametrize("checkpoint", [name for name in CASES if "floats" not in name], indirect=True)
def test_a_plan_expects_what_the_files_hold(checkpoint: tuple[str, Path, dict[str, np.ndarray]]) -> None:
    """But for the type of scales, of which a config says nothing."""
    _, folder, _ = checkpoint
    raw = json.loads((folder / "config.json").read_text())
    formats, config = expected_formats(section_of(raw)), read_config(folder)
    family = families.get(config.family)
    store, container = open_weights(folder)
    with store:
        for role, rule in (family.outer_tensors(config) | family.layer_tensors(config, 2)).items():
            expected = formats(role, rule)
            if len(rule.shape) == 2:
                assert expected.nbytes(rule.shape) == store.tensors[rule.name].nbytes
                assert (rule.name in container.tensors if container else False) == (not expected.is_raw)


def switched(folder: Path) -> dict[str, np.ndarray]:
    """A mixture as MLX has it, the experts of a layer as one; returns what the weights mean by their own names."""
    tensors, meant, stacks = {}, {}, {}
    for name, values in weights(folder).items():
        if values.ndim == 1:
            tensors[name] = torch.from_numpy(values)
            continue
        parts, meant[name] = affine(values, 4, 32)
        before, expert, after = name.partition(".experts.")
        for ending, part in parts.items():
            if expert:
                stacks.setdefault(f"{before}.switch_mlp.{after.split('.')[1]}.{ending}", []).append((int(after.split(".")[0]), part))
            else:
                tensors[name.removesuffix("weight") + ending] = part
    tensors |= {name: torch.stack([part for _, part in sorted(parts, key=lambda each: each[0])]) for name, parts in stacks.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "mlx"})
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization": {"bits": 4, "group_size": 32}}))
    return meant


def test_experts_that_lie_as_one_and_routers(tmp_path: Path) -> None:
    random_model(Case("qwen3_moe", {"hidden_size": 64, "head_dim": 16, "moe_intermediate_size": 32, "num_experts": 4,
                                    "num_experts_per_tok": 2, "num_hidden_layers": 2, "norm_topk_prob": True}), tmp_path)
    meant = switched(tmp_path)
    store, container = open_weights(tmp_path)
    with store:
        assert not {name for name in container.tensors if name.endswith("mlp.gate.weight")}, "routers choose: they stay wide"
        experts = [name for name in meant if ".experts." in name]
        assert len(experts) == 2 * 4 * 3
        for name in experts:
            stored = container.tensors[name]
            values = Weight.low_bit(stored.spec, stored.shape, store.read(store.tensors[name])).to_f32()
            np.testing.assert_array_equal(values, meant[name], err_msg=name)
    *_, engine = open_engine(tmp_path, EngineOptions(device="cpu", kv="32bit", ctx=64, threads=2))
    assert np.isfinite(engine.forward_logits([1, 5, 9])).all()
    engine.close()


def test_experts_from_the_disk_give_the_same_bits(tmp_path: Path) -> None:
    random_model(QWEN, tmp_path)
    switched(tmp_path)
    assert np.array_equal(paged(tmp_path, SLOTS), resident(tmp_path))


def refused(tmp_path: Path, change: dict[str, torch.Tensor | None]) -> str:
    """What is said of a folder some of whose tensors are others, or absent."""
    written(tmp_path / "m", "affine 4")
    tensors = load_file(tmp_path / "m" / "model.safetensors") | change
    save_file({name: part for name, part in tensors.items() if part is not None}, tmp_path / "m" / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        store, _ = open_weights(tmp_path / "m")
        with store:
            store.read(store.tensors[f"{UP}.weight"])
    assert caught.value.hint
    return caught.value.message


@pytest.mark.parametrize(("ending", "part", "said"), [
    ("weight", torch.zeros(768, 33, dtype=torch.uint32), "weight U32 [768, 33]"),
    ("weight", torch.zeros(768, 32, dtype=torch.int32), "I32"),
    ("scales", torch.zeros(768, 3, dtype=torch.bfloat16), "scales BF16 [768, 3]"), ("scales", torch.zeros(767, 4), "scales F32 [767, 4]"),
    ("biases", None, "for 256 inputs"), ("biases", torch.zeros(768, 4, dtype=torch.int32), "biases I32"),
    ("scales", torch.full((768, 4), float("nan"), dtype=torch.bfloat16), "a scale or bias is NaN")])
def test_parts_that_do_not_fit_are_named(tmp_path: Path, ending: str, part: torch.Tensor | None, said: str) -> None:
    message = refused(tmp_path, {f"{UP}.{ending}": part})
    assert UP in message and said in message


@pytest.mark.parametrize(("change", "said"), [
    ({"bits": 7}, "bits 7"), ({"bits": "4"}, "bits '4'"), ({"group_size": 48}, "group_size 48"), ({"mode": "mxfp4"}, "mode 'mxfp4'"),
    ({"mode": "other"}, "mode 'other'"), ({"group_size": None}, "group_size None")])
def test_a_section_that_says_something_else_is_refused(change: dict[str, object], said: str) -> None:
    raw = json.loads((FABLE / "config.json").read_text())
    with pytest.raises(ConfigError) as caught:
        parse_config(raw | {"quantization": {"bits": 4, "group_size": 64} | change})
    assert said in caught.value.message and "of MLX: affine" in caught.value.hint


def test_a_family_that_was_not_compared_is_refused() -> None:
    raw = json.loads((FABLE / "config.json").read_text()) | {"quantization": {"bits": 4, "group_size": 64}}
    parse_config(raw)
    with pytest.raises(ConfigError, match="MLX quantized are not read of apertus models"):
        parse_config(raw | {"model_type": "apertus", "architectures": ["ApertusForCausalLM"], "hidden_act": "xielu"})
