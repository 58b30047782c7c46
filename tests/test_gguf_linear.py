"""GGUF files of Qwen 3.5, dense and mixtures: the answers of a folder with the same weights, llama.cpp's output, and contradictory
metadata.

Their heads of values go around those of keys. The files are written here from a folder, see `gguf_linear_attention.py`.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from conversions import options, run
from family_models import oracle, written
from gguf_linear_attention import ARCH, CASES, NEXT, write
from gguf_samples import Reader
from gpu_runs import opened as with_card
from gpu_runs import simulated
from hub_server import Hub
from hub_user import HubUser
from safetensors.numpy import save_file
from saved_models import saved
from test_paged_models import paged, resident

from effllm.offload.safetensors_header import CheckpointError
from effllm.quant.imports.gguf import NATIVE
from effllm.runtime.config import parse_config, read_config
from effllm.runtime.engine import open_engine
from effllm.runtime.gguf.export import export_gguf
from effllm.runtime.gguf.store import open_gguf_store
from effllm.runtime.prepare import EngineOptions, prepare

IDS = np.random.default_rng(4).integers(0, 300, 90).tolist()
DENSE, MIXTURE = CASES


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {family: tmp_path_factory.mktemp("linear") / family for family in CASES}
    for family, folder in made.items():
        model = written(CASES[family], folder)
        np.save(folder / "logits.npy", oracle(model, IDS))
    return made


def logits(path: Path, **asked: object) -> np.ndarray:
    *_, engine = open_engine(path, EngineOptions(**{"device": "cpu", "kv": "32bit", "ctx": 128, "threads": 2, "exact": True, **asked}))
    try:
        return np.concatenate([rows.copy() for _, rows in engine.score(IDS)])
    finally:
        engine.close()


def near(ours: np.ndarray, theirs: np.ndarray, within: float = 1e-4) -> bool:
    return bool(np.abs(ours - theirs).max() < within * np.abs(theirs).max())


def changed(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    """Another value below the architecture's name; None takes the key away."""
    name = f"{writer.arch}.{key}"
    writer.kv_data[0].pop(name, None)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array, str: writer.add_string}
    if value is not None:
        add[type(value)](name, value)


@pytest.mark.parametrize("family", CASES)
def test_a_file_answers_as_its_folder_and_transformers(folders: dict[str, Path], tmp_path: Path, family: str) -> None:
    write(folders[family], tmp_path / "m.gguf")
    config, folder = read_config(tmp_path / "m.gguf", strict=True), read_config(folders[family])
    assert replace(config.recurrent, tiled=False) == folder.recurrent and config.recurrent.tiled and not config.warnings
    for name in ("family", "moe", "recurrent_layers", "output_gate_in_q", "norm_kind", "head_dim", "tie_word_embeddings"):
        assert getattr(config, name) == getattr(folder, name), name
    got = logits(tmp_path / "m.gguf")
    assert near(got, logits(folders[family]), 2e-5)
    assert near(got, np.load(folders[family] / "logits.npy"), 1e-4)


def test_the_order_of_heads_is_what_the_file_means(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folders[DENSE], tmp_path / "m.gguf")
    expected, real = logits(tmp_path / "m.gguf"), parse_config
    monkeypatch.setattr("effllm.runtime.gguf.config.parse_config",
                        lambda raw, strict: real({**raw, "linear_value_heads_tiled": False}, strict))
    assert not near(logits(tmp_path / "m.gguf"), expected, 0.1)


def test_as_many_heads_of_values_as_of_keys_have_no_other_order(tmp_path: Path) -> None:
    saved(replace(CASES[DENSE], changes={**CASES[DENSE].changes, "linear_num_key_heads": 6}), tmp_path / "source")
    write(tmp_path / "source", tmp_path / "m.gguf")
    assert read_config(tmp_path / "m.gguf").recurrent == read_config(tmp_path / "source").recurrent
    assert near(logits(tmp_path / "m.gguf"), logits(tmp_path / "source"), 2e-5)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "BF16", *(pytest.param(kind, marks=pytest.mark.slow)
                                                          for kind in ("Q4_0", "Q6_K", "Q5_1", "F16"))])
@pytest.mark.parametrize("family", CASES)
def test_matrices_in_blocks(folders: dict[str, Path], tmp_path: Path, family: str, kind: str) -> None:
    """As codes where the kernels multiply them, columns and rows where the file has them."""
    meant = write(folders[family], tmp_path / "m.gguf", kind)
    with open_gguf_store(tmp_path / "m.gguf", low_bit=True) as store:
        low = set() if store.container is None else store.container.tensors.keys()
        assert store.tensors.keys() == meant.keys()
    for part in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"):
        assert (f"model.layers.0.linear_attn.{part}.weight" in low) == (kind in NATIVE)
    assert not any("norm" in name or "conv1d" in name or "A_log" in name for name in low)
    (tmp_path / "folder").mkdir()
    save_file({name: np.ascontiguousarray(values, np.float32) for name, values in meant.items()}, tmp_path / "folder" / "model.safetensors")
    (tmp_path / "folder" / "config.json").write_bytes((folders[family] / "config.json").read_bytes())
    expected, got = logits(tmp_path / "folder"), logits(tmp_path / "m.gguf")
    assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()
    assert np.isfinite(logits(tmp_path / "m.gguf", exact=False)).all()


def test_a_file_may_say_that_its_heads_were_not_moved(folders: dict[str, Path], tmp_path: Path) -> None:
    write(folders[DENSE], tmp_path / "m.gguf", moves=False, change=lambda writer: changed(writer, "ssm.v_head_reordered", False))
    assert read_config(tmp_path / "m.gguf", strict=True).recurrent == read_config(folders[DENSE]).recurrent
    assert near(logits(tmp_path / "m.gguf"), logits(folders[DENSE]), 2e-5)


@pytest.mark.parametrize("kind", ["Q4_K", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("F32", "Q8_0"))])
def test_early_files_of_qwen3_next_are_joined_as_its_folders(tmp_path: Path, kind: str) -> None:
    """Rows of codes are gathered like any other."""
    model = written(NEXT, tmp_path / "source")
    meant = write(tmp_path / "source", tmp_path / "m.gguf", kind, moves=False,
                  change=lambda writer: changed(writer, "rope.dimension_sections", None))
    config = read_config(tmp_path / "m.gguf", strict=True)
    assert config.family == "qwen3_next" and config.recurrent == read_config(tmp_path / "source").recurrent and config.mtp_layers == 0
    (tmp_path / "folder").mkdir()
    save_file({name: np.ascontiguousarray(values, np.float32) for name, values in meant.items()}, tmp_path / "folder" / "model.safetensors")
    (tmp_path / "folder" / "config.json").write_bytes((tmp_path / "source" / "config.json").read_bytes())
    got = logits(tmp_path / "m.gguf")
    assert near(got, logits(tmp_path / "folder"), 2e-5)
    assert kind != "F32" or near(got, oracle(model, IDS))
    with open_gguf_store(tmp_path / "m.gguf", low_bit=True) as store:
        held = {} if store.container is None else store.container.tensors
        for part in ("qkv", "z", "a", "b"):
            assert (f"model.layers.0.linear_attn.in_proj_{part}.weight" in held) == (kind != "F32")


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_gates_and_ups_of_experts_in_one_tensor(folders: dict[str, Path], tmp_path: Path, kind: str) -> None:
    write(folders[MIXTURE], tmp_path / "joint.gguf", kind, joint=True)
    write(folders[MIXTURE], tmp_path / "parted.gguf", kind)
    assert any("ffn_gate_up_exps" in tensor.name for tensor in Reader(tmp_path / "joint.gguf").tensors)
    np.testing.assert_array_equal(logits(tmp_path / "joint.gguf"), logits(tmp_path / "parted.gguf"))


@pytest.mark.parametrize("joint", [False, True])
def test_experts_come_from_the_file(folders: dict[str, Path], tmp_path: Path, joint: bool) -> None:
    """One expert by itself, also where its gate and up are halves of one tensor."""
    write(folders[MIXTURE], tmp_path / "m.gguf", "Q8_0", joint=joint)
    assert np.array_equal(paged(tmp_path / "m.gguf", 30), resident(tmp_path / "m.gguf"))


def behind(writer: gguf.GGUFWriter) -> None:
    """A layer that predicts a token ahead, which files count among their blocks."""
    changed(writer, "block_count", 6)
    changed(writer, "nextn_predict_layers", 1)
    writer.add_tensor("blk.5.nextn.eh_proj.weight", np.ones((256, 512), np.float32))
    writer.add_tensor("blk.5.attn_norm.weight", np.ones(256, np.float32))


@pytest.mark.parametrize("change", [
    behind, lambda writer: changed(writer, "attention.recurrent_layers", [True, True, False, True, True]),
    lambda writer: changed(writer, "attention.head_count_kv", [0, 0, 2, 0, 0]),
    lambda writer: changed(writer, "attention.head_count_kv", [2] * 5),
    lambda writer: changed(writer, "rope.dimension_sections", [11, 11, 10, 0]),
    lambda writer: changed(writer, "rope.dimension_sections", None), lambda writer: changed(writer, "ssm.v_head_reordered", True),
    lambda writer: changed(writer, "expert_gating_func", 1)])
@pytest.mark.parametrize("family", [name if name == MIXTURE else pytest.param(name, marks=pytest.mark.slow) for name in CASES])
def test_what_changes_nothing(folders: dict[str, Path], tmp_path: Path, family: str, change: Callable[[gguf.GGUFWriter], None]) -> None:
    write(folders[family], tmp_path / "m.gguf", change=change)
    config = read_config(tmp_path / "m.gguf", strict=True)
    assert config.num_hidden_layers == 5 and config.recurrent_layers == (0, 1, 3, 4)
    assert near(logits(tmp_path / "m.gguf"), logits(folders[family]), 2e-5)


def test_what_a_file_leaves_out_is_what_llamacpp_takes_for_granted(folders: dict[str, Path], tmp_path: Path) -> None:
    def without(writer: gguf.GGUFWriter) -> None:
        for key in ("attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base",
                    "rope.dimension_sections", "full_attention_interval"):
            changed(writer, key, None)

    write(folders[DENSE], tmp_path / "m.gguf", change=without)
    config = read_config(tmp_path / "m.gguf", strict=True)
    assert (config.num_key_value_heads, config.head_dim, config.rope.partial_rotary_factor, config.rope.theta) == (4, 64, 1.0, 10_000.0)
    assert config.recurrent_layers == (0, 1, 2, 4)


@pytest.mark.parametrize("key, value, said", [
    ("rope.dimension_sections", [2, 2, 2, 2], r"dimension_sections \[2, 2, 2, 2\] for 8 pairs"),
    ("rope.dimension_sections", [8, 0, 0, 0], "for 8 pairs"), ("rope.dimension_sections", [0, 0, 0, 0], "for 8 pairs"),
    ("rope.dimension_sections", [11, 11], "expected three or four"), ("rope.dimension_sections", [3, 3, -2, 0], "expected three or four"),
    ("rope.dimension_sections", 3, "expected three or four"), ("rope.dimension_sections", [1 << 20, 0, 0, 0], "expected three or four"),
    ("rope.dimension_count", 0, "rope.dimension_count"), ("rope.dimension_count", 128, "rope.dimension_count"),
    ("ssm.inner_size", 767, "ssm.inner_size 767 for 6 heads"), ("ssm.inner_size", 384, "shape"), ("ssm.inner_size", 0, "ssm.inner_size"),
    ("ssm.inner_size", "wide", "ssm.inner_size"), ("ssm.time_step_rank", 0, "ssm.time_step_rank"),
    ("ssm.time_step_rank", 3, "ssm.time_step_rank 3 is not a multiple of qwen35.ssm.group_count 2"),
    ("ssm.group_count", 4, "is not a multiple of qwen35.ssm.group_count 4"), ("ssm.group_count", 3, "shape"),
    ("ssm.group_count", None, "lacks key qwen35.ssm.group_count"), ("ssm.state_size", 64, "shape"), ("ssm.state_size", True, "state_size"),
    ("ssm.conv_kernel", 2, "shape"), ("ssm.conv_kernel", 1 << 30, "ssm.conv_kernel"), ("ssm.conv_kernel", 4.5, "ssm.conv_kernel"),
    ("full_attention_interval", 0, "full_attention_interval"), ("full_attention_interval", 9, "only linear attention"),
    ("full_attention_interval", 2, "blk"), ("feed_forward_length", None, "lacks key qwen35.feed_forward_length"),
    ("attention.recurrent_layers", [True, False], "a boolean for each of 5 layers"),
    ("attention.recurrent_layers", [1, 1, 2, 1, 1], "a boolean for each"), ("attention.recurrent_layers", True, "a boolean for each"),
    ("nextn_predict_layers", 1, "blk.4"), ("nextn_predict_layers", 5, "5 of 5 blocks"), ("nextn_predict_layers", 1 << 31, "nextn_predict"),
    ("attention.head_count_kv", [0] * 5, "a number of heads for each layer"), ("attention.head_count_kv", [0, 2], "for each layer"),
    ("attention.head_count_kv", [0, 0, 2, 0, 4], "another qwen35.attention.head_count_kv"),
    ("attention.head_count_kv", [0, 0, -2, 0, 0], "for each layer"), ("attention.head_count_kv", [0, 2, 0, 0, 0], "blk.1"),
    ("ssm.v_head_reordered", 1, "v_head_reordered 1, expected true or false"),
    ("block_count", 0, "block_count"), ("attention.sliding_window", 32, "sliding_window"), ("attention.head_count", 0, "head_count"),
    ("attention.clamp_kqv", 8.0, "clamp_kqv"), ("expert_count", 4, "expert_count")])
def test_lies(folders: dict[str, Path], tmp_path: Path, key: str, value: object, said: str) -> None:
    write(folders[DENSE], tmp_path / "m.gguf", change=lambda writer: changed(writer, key, value))
    with pytest.raises(CheckpointError, match=said) as caught:
        list(open_engine(tmp_path / "m.gguf", EngineOptions(device="cpu", ctx=128)))
    assert caught.value.hint and "\n" not in caught.value.message


@pytest.mark.parametrize("name, worst", [("ssm_a", 0.0), ("ssm_a", 0.5), ("ssm_a", np.nan), ("ssm_a", -np.inf), ("ssm_dt.weight", None),
                                         ("attn_q.bias", None), ("ssm_ba.weight", None), ("ssm_conv1d.bias", None)])
def test_tensors_that_no_such_model_has(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str,
                                        worst: float | None) -> None:
    real = gguf.GGUFWriter.add_tensor

    def add_tensor(writer: gguf.GGUFWriter, own: str, data: np.ndarray, **more: object) -> None:
        if own == "blk.1.ssm_a":
            if worst is not None:
                data = np.where(np.arange(len(data)) == 2, np.float32(worst), data)
            else:
                real(writer, f"blk.1.{name}", np.zeros(6, np.float32))
        real(writer, own, data, **more)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add_tensor)
    write(folders[DENSE], tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=f"blk.1.{name}") as caught:
        list(open_engine(tmp_path / "m.gguf", EngineOptions(device="cpu", ctx=128)))
    assert caught.value.hint and "\n" not in caught.value.message


@pytest.mark.parametrize("family", CASES)
def test_what_a_pull_says_of_its_memory(folders: dict[str, Path], tmp_path: Path, hub: Hub, family: str) -> None:
    """Before the download, from the keys; a mixture need not state the width of layers that it does not have."""
    write(folders[family], tmp_path / "m.gguf", "Q8_0", change=lambda writer: (writer.add_file_type(7), words(writer)))
    assert (family == MIXTURE) != (f"{ARCH[family]}.feed_forward_length" in Reader(tmp_path / "m.gguf").fields)
    hub.add("org/name", files={"m.gguf": (tmp_path / "m.gguf").read_bytes()})
    plan = HubUser(tmp_path / "home", hub.endpoint).run("pull", "org/name:m.gguf", "--dry-run", "--json").json
    prepared = prepare(tmp_path / "m.gguf", EngineOptions())
    prepared.store.close()
    assert plan["memory"]["weights_bytes"] == pytest.approx(prepared.placement.weights_bytes, rel=0.1)
    assert plan["memory"]["kv_bytes"] == prepared.placement.kv_bytes


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("family", CASES)
def test_a_gpu_answers_the_same(folders: dict[str, Path], tmp_path: Path, family: str, kind: str) -> None:
    write(folders[family], tmp_path / "m.gguf", kind)
    engine, _ = with_card(tmp_path / "m.gguf", simulated(), kv="32bit", ctx=128, exact=True, device="cuda")
    try:
        got = np.concatenate([rows.copy() for _, rows in engine.score(IDS)])
    finally:
        engine.close()
    assert near(got, logits(tmp_path / "m.gguf"), 2e-3)


def words(writer: gguf.GGUFWriter) -> None:
    """A vocabulary."""
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"word{i}" for i in range(297))])
    writer.add_token_scores([0.0] * 300)
    writer.add_token_types([2, 3, 3] + [1] * 297)


def test_a_folder_made_of_a_file_keeps_its_order(folders: dict[str, Path], tmp_path: Path) -> None:
    write(folders[DENSE], tmp_path / "m.gguf", change=words)
    run(tmp_path / "m.gguf", tmp_path / "folder", options("8bit"))
    run(folders[DENSE], tmp_path / "other", options("8bit"))
    assert json.loads((tmp_path / "folder" / "config.json").read_text())["linear_value_heads_tiled"]
    assert near(logits(tmp_path / "folder"), logits(tmp_path / "other"), 1e-3)


@pytest.mark.parametrize("source", ["folder", "8 bits", "file", "8 bits of a file"])
def test_an_export_holds_what_the_converter_writes(folders: dict[str, Path], tmp_path: Path, source: str) -> None:
    """Tensor by tensor, whatever order the source has its heads in."""
    path = folders[DENSE]
    if "file" in source:
        write(path, path := tmp_path / "source.gguf", change=words)
    if "8 bits" in source:
        run(path, path := tmp_path / "8bit", options("8bit"))
    list(export_gguf(path, tmp_path / "out.gguf", "F16", "a name", tokenizer={"tokenizer.ggml.model": "no_vocab"}))
    write(folders[DENSE], tmp_path / "theirs.gguf")
    ours, theirs = ({tensor.name: tensor for tensor in Reader(tmp_path / name).tensors} for name in ("out.gguf", "theirs.gguf"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        got, wanted = np.asarray(ours[name].data, np.float32), np.asarray(tensor.data)
        assert got.shape == wanted.shape and near(got, wanted, 1e-2 if "8 bits" in source else 1e-3), name
    keys, others = (Reader(tmp_path / name).fields for name in ("out.gguf", "theirs.gguf"))
    for key in others.keys() - {"general.architecture"}:
        if key.startswith("qwen35."):
            assert np.allclose(keys[key].contents(), others[key].contents()), key


@pytest.mark.peer
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F32", "F16"])
@pytest.mark.parametrize("family", CASES)
def test_llamacpp_answers_the_same(folders: dict[str, Path], tmp_path: Path, family: str, kind: str) -> None:
    """Tokens that its rounding sends to other experts left aside."""
    peer = pytest.importorskip("llama_cpp")

    def tokenless(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("no_vocab")
        writer.add_vocab_size(300)

    write(folders[family], tmp_path / "m.gguf", kind, change=tokenless)
    model = peer.Llama(str(tmp_path / "m.gguf"), n_ctx=128, n_threads=2, verbose=False, type_k=0, type_v=0, logits_all=True)
    try:
        model.eval(IDS)
        theirs = model.scores[: len(IDS)].copy()
    finally:
        model.close()
    assert read_config(tmp_path / "m.gguf").family == family and ARCH[family] in (tmp_path / "m.gguf").read_bytes()[:400].decode("latin-1")
    worst = np.abs(logits(tmp_path / "m.gguf") - theirs).max(axis=1) / np.abs(theirs).max()
    assert worst.max() < 1e-4 if kind == "F32" else np.median(worst) < 5e-3
