"""Conversion: the bytes it writes, in every format and by every method, independent of blocks, threads and shards."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from conversions import FABLE, check_whole, contents, odd_model, options, originals, run, short_fable
from safetensors.torch import load_file, save_file

from effllm import UsageError
from effllm.offload.checkpoint import TensorStore
from effllm.offload.folder_writer import partial_folder
from effllm.offload.shards import PAD
from effllm.quant import methods
from effllm.quant.codes import dequantize
from effllm.quant.pack import unpack
from effllm.quant.spec import QuantSpec
from effllm.quant.weight import to_f32
from effllm.runtime.conversion import convert_estimate, convert_plan, convert_stream
from effllm.runtime.convert import ConvertOptions, convert, recipe_of
from effllm.runtime.events import Notice
from effllm.runtime.stores.container import read_container


@pytest.fixture(scope="module")
def four_bit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("convert") / "fable-4bit"
    run(FABLE, out)
    return out


# -- what is made ----------------------------------------------------------------------------------------------------------------


def test_a_folder_that_holds_what_it_says(four_bit: Path) -> None:
    made = check_whole(four_bit, FABLE)
    assert made.spec_text == "4bit" and 4 < made.bits_per_weight < 5
    assert {str(stored.spec) for stored in made.tensors.values()} == {str(QuantSpec.parse("4bit")), str(QuantSpec.parse("6bit")), "bf16"}
    assert str(made.tensors["model.embed_tokens.weight"].spec) == str(QuantSpec.parse("6bit"))
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "README.md"):
        assert (four_bit / name).read_bytes() == (FABLE / name).read_bytes()
    assert not partial_folder(four_bit).exists()


def test_layers_begin_on_pages_and_what_is_read_together_lies_together(four_bit: Path) -> None:
    with TensorStore.open(four_bit) as store:
        for layer in range(6):
            at = f"model.layers.{layer}."
            names = [f"self_attn.{name}" for name in "qkvo"] + [f"mlp.{name}" for name in ("gate", "up", "down")]
            infos = [store.tensors[f"{at}{name}_proj.weight"] for name in names]
            assert infos[0].offset % 4096 == 0
            for one, two in zip(infos, infos[1:], strict=False):
                assert one.offset + one.nbytes == two.offset, f"{two.name} does not follow {one.name}"
        assert any(name.startswith(PAD) for name in store.tensors)


@pytest.mark.parametrize("spec", ["4bit", "3bit", "2bit", "8bit", "5bit", "ternary", "affine3:32", "affine4:128", "symmetric6:16"])
def test_every_format_on_widths_that_nothing_divides(tmp_path: Path, spec: str) -> None:
    source = odd_model(tmp_path / "odd")
    made, said = run(source, tmp_path / "out", options(spec))
    check_whole(tmp_path / "out", source)
    padded = [line for line in said if "is padded to" in line]
    assert len(padded) == len({line.partition(" of ")[2] for line in padded}), "once per shape and format"
    assert any("48 x 40" in line for line in padded)
    assert made.after == sum(stored.nbytes for stored in read_container(tmp_path / "out").tensors.values())
    assert sorted(contents(tmp_path / "out")) == ["LICENSE", "config.json", "effllm.json", "model.safetensors"]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_stored_types_are_read_and_raw_ones_kept(tmp_path: Path, dtype: type) -> None:
    source = odd_model(tmp_path / "odd", dtype)
    run(source, tmp_path / "out")
    made = check_whole(tmp_path / "out", source)
    assert made.tensors["model.norm.weight"].spec.scheme == {np.float32: "f32", np.float16: "f16"}[dtype]


def test_rules_choose_by_name_the_last_wins_and_raw_types_convert(tmp_path: Path) -> None:
    source = odd_model(tmp_path / "odd")
    run(source, tmp_path / "out", options("3bit", rules=("proj=affine4:32", "down_proj=8bit", "lm_head=bf16")))
    made = check_whole(tmp_path / "out", source)
    specs = {name: str(stored.spec) for name, stored in made.tensors.items()}
    assert specs["model.layers.0.self_attn.q_proj.weight"] == "affine4:32"
    assert specs["model.layers.1.mlp.down_proj.weight"] == str(QuantSpec.parse("8bit"))
    assert specs["lm_head.weight"] == "bf16" and specs["model.norm.weight"] == "f32"
    assert specs["model.embed_tokens.weight"] == str(QuantSpec.parse("6bit"))


def test_neither_blocks_nor_threads_change_a_byte(tmp_path: Path, four_bit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert_stream, "BLOCK_NBYTES", 50_000)
    run(FABLE, tmp_path / "small-blocks", options(threads=1))
    assert contents(tmp_path / "small-blocks") == contents(four_bit)


def test_shards_hold_the_same_tensors(tmp_path: Path, four_bit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert_plan, "plan_files", partial(convert_plan.plan_files, limit=1 << 20))
    run(FABLE, tmp_path / "out")
    made = check_whole(tmp_path / "out", FABLE)
    assert "model.safetensors.index.json" in made.files
    assert replace(made, files={}) == replace(read_container(four_bit), files={})
    shards = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(shards) > 2 and all(path.stat().st_size <= 1 << 20 for path in shards)
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()


def test_tensors_that_the_model_does_not_read_are_left_out_and_said(tmp_path: Path) -> None:
    unread = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(6, np.float32)}
    source = odd_model(tmp_path / "odd", change=lambda tensors: tensors.update(unread))
    _, said = run(source, tmp_path / "out")
    assert any("left out" in line and "inv_freq" in line for line in said)
    assert "inv_freq" not in "".join(read_container(tmp_path / "out").tensors)


# -- calibrated ------------------------------------------------------------------------------------------------------------------

TEXT = "Once upon a time a fox met a king at the river, and they talked about the weather, the harvest and the price of bread. " * 25


@pytest.fixture
def short(tmp_path: Path) -> Path:
    return short_fable(tmp_path / "short")


def with_text(spec: str, method: str, **more: object) -> ConvertOptions:
    return options(spec, method=method, calibration_text=TEXT, calibration_tokens=512, **more)


def test_what_the_first_call_compiles_is_no_part_of_the_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method compiles its loops and loads its libraries once; multiplied by the weights of a model that was minutes of seconds."""
    times = iter([9.0, 0.2, 0.9])  # the first call, 96 rows, 768 rows: 0.1 s for a block of 256 inputs and 1/960 s a row
    monkeypatch.setattr(convert_estimate, "_seconds", lambda *given: next(times))
    monkeypatch.setattr(convert_estimate, "_factored_s", lambda stats: 0.01)
    monkeypatch.setattr(convert_estimate, "_multiplications", lambda depth: 1e18)
    monkeypatch.setattr(convert_estimate, "_text_s", lambda *given: 0.0)
    said = next(event.text for event in convert(FABLE, tmp_path / "out", options(method="gptq")) if isinstance(event, Notice))
    weights, inputs = 5_770_496 - 13 * 256, 6 * (6 * 256 + 768) + 256  # all but the norms; of all tensors, each a block
    hessians = 6 * (3 + 27) + 1  # of q, k, v, of o, of gate, up, and of down, whose rows are three times as long; the head's
    wanted = 0.1 * inputs / 256 + weights / 256 / 960 + 0.01 * hessians
    assert said.startswith("4bit with gptq by 16384 tokens of text: 5.767 M weights ") and f"take about {round(wanted)} s" in said, said


def test_what_text_shows_lowers_the_error_of_outputs_not_of_weights(tmp_path: Path, short: Path, four_bit: Path) -> None:
    _, said = run(short, tmp_path / "out", with_text("4bit", "gptq"))
    assert sum("different tokens among 512" in line for line in said) == 1, "one sentence over and over"
    assert any(line.startswith("4bit with gptq by 512 tokens of text: ") for line in said), said
    made, plain = check_whole(tmp_path / "out", short), read_container(four_bit)
    assert made.method == {"name": "gptq"} and made.calibration["tokens"] == 512 and made.calibration["text"] == "given"
    matrices = [name for name in made.tensors if "proj" in name]
    assert len(matrices) == 14 and all(made.tensors[name].crc32 != plain.tensors[name].crc32 for name in matrices)
    worse = sum(made.tensors[name].error_db > plain.tensors[name].error_db for name in matrices)
    assert worse > len(matrices) // 2, "weights that are off more, for outputs that are off less"


def test_a_calibrated_run_is_resumed_with_the_same_bytes(tmp_path: Path, short: Path) -> None:
    given = with_text("3bit", "smooth")
    run(short, tmp_path / "straight", given)
    running = convert(short, tmp_path / "out", given)
    for item in running:
        if "layers.1.self_attn.o_proj" in str(item):
            break
    running.close()
    assert 0 < (partial_folder(tmp_path / "out") / "journal").read_bytes().count(b"\n") < 19
    _, said = run(short, tmp_path / "out", given)
    assert any("earlier run stopped" in line for line in said)
    assert contents(tmp_path / "out") == contents(tmp_path / "straight")


def test_equalising_changes_norms_and_not_what_the_model_says(tmp_path: Path, short: Path) -> None:
    run(short, tmp_path / "out", with_text("8bit", "smooth"))
    before, norm = dict(originals(short)), "model.layers.1.input_layernorm.weight"
    with TensorStore.open(tmp_path / "out") as store:
        after = to_f32(store.read(store.tensors[norm]).view(np.uint16), "bf16")
        q = read_container(tmp_path / "out").tensors["model.layers.1.self_attn.q_proj.weight"]
        turned = dequantize(unpack(store.read(store.tensors[q.name]), q.spec, q.shape), q.spec) * after
    assert not np.array_equal(after, before[norm])
    wanted = before[q.name] * before[norm]
    assert np.linalg.norm(turned - wanted) < 0.02 * np.linalg.norm(wanted)


@pytest.mark.slow
def test_outliers_lie_beside_the_base(tmp_path: Path, short: Path) -> None:
    run(short, tmp_path / "out", with_text("3bit+1%", "spqr", rules=("(o|gate|up|down)_proj=4bit",)))
    made = check_whole(tmp_path / "out", short)
    stored = made.tensors["model.layers.0.self_attn.q_proj.weight"]
    assert stored.spec.outliers == 0.01 and made.tensors["model.layers.0.self_attn.o_proj.weight"].spec.outliers == 0
    with TensorStore.open(tmp_path / "out") as store:
        codes = unpack(store.read(store.tensors[stored.name]), stored.spec, stored.shape)
    assert len(codes.sparse.row) == round(0.01 * 256 * 256)


@pytest.mark.slow
def test_outliers_of_what_no_text_shows_are_kept_too(tmp_path: Path, short: Path) -> None:
    """An embedding beside a head of its own: no text shows its inputs."""
    untied = json.loads((short / "config.json").read_text()) | {"tie_word_embeddings": False}
    (short / "config.json").write_text(json.dumps(untied))
    tensors = load_file(short / "model.safetensors")
    (short / "model.safetensors").unlink()
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, short / "model.safetensors")
    recipe = recipe_of("3bit", ("embed_tokens=4bit", "lm_head=4bit"), "spqr")
    run(short, tmp_path / "out", ConvertOptions(recipe, "3bit", method="spqr", calibration_text=TEXT, calibration_tokens=512))
    made = check_whole(tmp_path / "out", short)
    embed, head = (made.tensors[name] for name in ("model.embed_tokens.weight", "lm_head.weight"))
    assert embed.spec == head.spec == QuantSpec.parse("4bit+0.5%") and embed.error_db < head.error_db


@pytest.mark.slow
@pytest.mark.parametrize("method", methods.METHODS)
def test_every_method_makes_a_whole_model_of_a_width_alone(tmp_path: Path, short: Path, method: str) -> None:
    text = {"calibration_text": TEXT, "calibration_tokens": 512} if methods.get(method).NEEDS else {}
    run(short, tmp_path / "out", ConvertOptions(recipe_of("4bit", (), method), "4bit", method=method, **text))
    made = read_container(tmp_path / "out")
    assert made.method == {"name": method} and 4.2 < made.bits_per_weight < 5.35
    assert all(stored.spec.is_raw == ("norm" in name) for name, stored in made.tensors.items())


@pytest.mark.parametrize("method, text, said", [("gptq", "too short", "the calibration text has"),
                                                ("rtn", TEXT, "needs no calibration text")])
def test_texts_that_are_too_short_or_serve_nobody(tmp_path: Path, method: str, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run(FABLE, tmp_path / "out", options(method=method, calibration_text=text))
    with pytest.raises(UsageError, match="too few"):
        options(calibration_tokens=10)
    assert not list(tmp_path.iterdir())
