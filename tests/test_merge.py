"""LoRA adapters merged into their models: the weights of the formula in float64, rounded once; everything else is unchanged."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from family_models import DELTA, Case, assert_logits_match, text
from lora_adapters import PREFIX, RANK, adapter, peft, random, weights
from safetensors.torch import save_file
from saved_models import saved
from transformers import AutoModelForCausalLM

from effllm import EffllmError
from effllm.offload.checkpoint import TensorStore
from effllm.offload.folder_writer import partial_folder
from effllm.runtime.adapters import merge as merging
from effllm.runtime.adapters.adapter import is_quick
from effllm.runtime.adapters.merge import Merged, merge
from effllm.runtime.events import Notice

LAYER = "model.layers.1."
MODULES = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def base(request, tmp_path_factory) -> Path:
    """In several files."""
    folder = tmp_path_factory.mktemp("base") / "model"
    saved(Case("llama", {"tie_word_embeddings": False}, shard="150KB", dtype=request.param), folder)
    assert len([*folder.glob("*.safetensors")]) > 1
    return folder


def matrices(base: Path, modules=MODULES) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    found, own = {}, weights(base)
    for seed, module in enumerate(modules):
        rows, columns = own[f"{LAYER}{module}.weight"].shape
        found[LAYER + module] = random(RANK, columns, seed=seed), random(rows, RANK, seed=seed + 50)
    return found


def merged(base: Path, own: Path, out: Path) -> Merged:
    return [*merge(base, own, out)][-1]


def assert_is(base: Path, out: Path, changed: dict[str, torch.Tensor]) -> None:
    """`changed` in float64; every other tensor has its bytes, and every file but for weights."""
    before, after = weights(base), weights(out)
    assert before.keys() == after.keys() and {each.name for each in base.iterdir()} == {each.name for each in out.iterdir()}
    for name, tensor in after.items():
        if name not in changed:
            assert torch.equal(tensor, before[name]), name
            continue
        near = changed[name].to(tensor.dtype).double(), 1e-2 if tensor.dtype == torch.bfloat16 else 1e-5
        assert torch.allclose(tensor.double(), near[0], rtol=near[1], atol=1e-5), name
        assert not torch.equal(tensor, before[name])


def added(base: Path, pairs: dict[str, tuple[torch.Tensor, torch.Tensor]], scale: float) -> dict[str, torch.Tensor]:
    own = weights(base)
    return {f"{module}.weight": own[f"{module}.weight"].double() + scale * (b.double() @ a.double()) for module, (a, b) in pairs.items()}


@pytest.mark.parametrize(("stated", "scale"), [({}, 10 / RANK), ({"use_rslora": True}, 10 / math.sqrt(RANK)),
                                               ({"alpha_pattern": {"model.layers.1.mlp.down_proj": 2, "layers.0": 7}}, 10 / RANK)])
def test_what_is_added_is_the_product_of_two_matrices(base, tmp_path, stated, scale):
    pairs = matrices(base)
    own = adapter(tmp_path / "adapter", peft(pairs), **stated)
    expected = added(base, pairs, scale)
    if "alpha_pattern" in stated:
        module = LAYER + "mlp.down_proj"
        expected |= added(base, {module: pairs[module]}, 2 / RANK)
    made = merged(base, own, tmp_path / "out")
    assert made.changed == len(MODULES) and made.tensors == len(weights(base))
    assert_is(base, tmp_path / "out", expected)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, attn_implementation="eager").eval()
    assert_logits_match(tmp_path / "out", model, text(model, 40))


def test_rows_get_the_lengths_that_were_trained(base, tmp_path):
    pairs = matrices(base)
    lengths = {module: random(len(b)).abs() + 0.5 for module, (_, b) in pairs.items()}
    own = adapter(tmp_path / "adapter", peft(pairs) | {f"{PREFIX}{name}.lora_magnitude_vector": each for name, each in lengths.items()},
                  use_dora=True)
    expected = added(base, pairs, 10 / RANK)
    for name, each in lengths.items():
        plain = expected[f"{name}.weight"]
        expected[f"{name}.weight"] = plain * (each.double() / plain.norm(dim=1))[:, None]
    merged(base, own, tmp_path / "out")
    assert_is(base, tmp_path / "out", expected)


def test_tables_and_what_comes_whole(base, tmp_path):
    table = weights(base)["model.embed_tokens.weight"]
    a, b = random(RANK, len(table)), random(table.shape[1], RANK)
    head, norm = random(*table.shape, seed=9), random(table.shape[1])
    own = adapter(tmp_path / "adapter", {
        f"{PREFIX}model.embed_tokens.lora_embedding_A": a, f"{PREFIX}model.embed_tokens.lora_embedding_B": b,
        f"{PREFIX}lm_head.weight": head, f"{PREFIX}model.norm.modules_to_save.default.weight": norm})
    merged(base, own, tmp_path / "out")
    assert_is(base, tmp_path / "out", {"model.embed_tokens.weight": table.double() + 2.5 * (b.double() @ a.double()).T,
                                       "lm_head.weight": head.double(), "model.norm.weight": norm.double()})


def test_what_is_added_to_what_comes_whole(base, tmp_path):
    """As PEFT saves a table that was trained by two matrices: beside them lies the table itself."""
    table = weights(base)["model.embed_tokens.weight"]
    a, b = random(RANK, len(table)), random(table.shape[1], RANK)
    own = adapter(tmp_path / "adapter", {
        f"{PREFIX}model.embed_tokens.lora_embedding_A": a, f"{PREFIX}model.embed_tokens.lora_embedding_B": b,
        f"{PREFIX}model.embed_tokens.base_layer.weight": table + 2})
    made = merged(base, own, tmp_path / "out")
    assert made.changed == 1
    assert_is(base, tmp_path / "out", {"model.embed_tokens.weight": (table + 2).double() + 2.5 * (b.double() @ a.double()).T})


def test_adapters_of_mlx_lie_the_other_way_round_and_state_what_they_are_multiplied_by(base, tmp_path):
    pairs = matrices(base)
    (own := tmp_path / "adapter").mkdir()
    for name in ("adapters.safetensors", "0000100_adapters.safetensors"):
        save_file({f"{module}.lora_{part}": each.T.contiguous() for module, pair in pairs.items() for part, each in zip("ab", pair)},
                  own / name)
    (own / "adapter_config.json").write_text(json.dumps({"fine_tune_type": "lora", "lora_parameters": {"rank": RANK, "scale": 3.0}}))
    merged(base, own, tmp_path / "out")
    assert_is(base, tmp_path / "out", added(base, pairs, 3.0))


def test_names_of_a_part_of_a_larger_model_are_found_by_their_end(base, tmp_path):
    pairs = matrices(base)
    longer = {name.replace("model.layers", "model.language_model.layers"): each for name, each in peft(pairs).items()}
    own = adapter(tmp_path / "adapter", longer)
    merged(base, own, tmp_path / "out")
    assert_is(base, tmp_path / "out", added(base, pairs, 10 / RANK))


def test_what_was_stopped_continues(base, tmp_path, monkeypatch):
    own = adapter(tmp_path / "adapter", peft(pairs := matrices(base)))
    steps = merge(base, own, tmp_path / "out")
    for _ in range(7):
        next(steps)
    steps.close()
    assert not (tmp_path / "out").exists()
    written_again = []
    real = merging._write
    monkeypatch.setattr(merging, "_write", lambda *args: written_again.append(args[3].name) or real(*args))
    merged(base, own, tmp_path / "out")
    assert 0 < len(written_again) < len(weights(base))
    assert_is(base, tmp_path / "out", added(base, pairs, 10 / RANK))


def test_what_was_stopped_continues_where_the_disk_has_room_for_the_rest_alone(base, tmp_path, monkeypatch):
    own, out = adapter(tmp_path / "adapter", peft(pairs := matrices(base))), tmp_path / "out"
    steps = merge(base, own, out)
    for _ in range(7):
        next(steps)
    steps.close()
    files = [path.stat() for path in partial_folder(out).glob("*.safetensors")]
    room = sum(file.st_size - 512 * file.st_blocks for file in files) + sum(path.stat().st_size for path in base.glob("*.json"))
    assert 0 < room < sum(file.st_size for file in files)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=room))
    merged(base, own, out)
    assert_is(base, out, added(base, pairs, 10 / RANK))


@pytest.mark.parametrize(("stated", "expected"), [
    ({"peft_type": "LOHA"}, "peft_type 'LOHA' is not LoRA"), ({"bias": "all"}, "bias = 'all'"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out"),
    ({"lora_alpha": None}, "lora_alpha is not a number"), ({"target_parameters": ["experts.down"]}, "target_parameters"),
    ({"layer_replication": [[0, 2]]}, "layer_replication"), ({"alpha_pattern": {"(": 2}}, "not a regular expression"),
    ({"alpha_pattern": {"q": "x"}}, "alpha_pattern of 'q' is not a number"), ({"alpha_pattern": ["q"]}, "alpha_pattern is not an object"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"), ({"init_lora_weights": "olora"}, "'olora'"),
    ({"kasa_config": {"beta": 1}}, "kasa_config"), ({"use_bdlora": {"nblocks": 2}}, "use_bdlora"),
    ({"lora_alpha": 10**400}, "lora_alpha is not a number"), ({"lora_alpha": math.nan}, "lora_alpha is not a number"),
    ({"alpha_pattern": {"q": 10**400}}, "alpha_pattern of 'q' is not a number"),
    ({"alpha_pattern": {"a{99999999999999999999}": 2}}, "not a regular expression"),
    *(({"alpha_pattern": {slow: 2}}, "could take hours") for slow in ("(.*)*x", "(.+)+x", "(" * 5000, "a?" * 30, "(a|a)" * 30))])
def test_what_is_not_computed_is_refused_by_its_key(base, tmp_path, stated, expected):
    own = adapter(tmp_path / "adapter", peft(matrices(base)), **stated)
    with pytest.raises(EffllmError) as refused:
        merged(base, own, tmp_path / "out")
    assert expected in refused.value.message and "\n" not in refused.value.message and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("change", "expected"), [
    (lambda made: {**made, f"{PREFIX}model.layers.9.mlp.up_proj.lora_A.weight": random(4, 64),
                   f"{PREFIX}model.layers.9.mlp.up_proj.lora_B.weight": random(88, 4)}, "which the model does not have"),
    (lambda made: {name: each for name, each in made.items() if "q_proj.lora_B" not in name}, "one of the two LoRA matrices"),
    (lambda made: {name: each[:, :-1] if "q_proj.lora_A" in name else each for name, each in made.items()}, "but the model has"),
    (lambda made: {name: each[:0] if "lora_A" in name else each[:, :0] for name, each in made.items()}, "that are not matrices"),
    (lambda made: {name: each[0] for name, each in made.items()}, "that are not matrices"),
    (lambda made: {name: each * math.nan for name, each in made.items()}, "NaN or infinity"),
    (lambda made: {f"{PREFIX}lm_head.weight": random(400, 64)}, "replaces 'lm_head.weight' with shape [400, 64]"),
    (lambda made: {name: each * 3e38 for name, each in made.items()}, "NaN or infinity")])
def test_what_does_not_fit_names_the_base(base, tmp_path, change, expected):
    own = adapter(tmp_path / "adapter", change(peft(matrices(base))))
    with pytest.raises(EffllmError) as refused:
        merged(base, own, tmp_path / "out")
    assert expected in refused.value.message and "org/base" in refused.value.hint


@pytest.mark.parametrize(("again", "expected"), [
    (lambda name: name.replace(".weight", ".default.weight"), "holds a matrix of 'model.layers.0.self_attn.q_proj' twice"),
    (lambda name: name.removeprefix(PREFIX).replace("model.", "language_model."), "changes 'model.layers.0.self_attn.q_proj.weight' tw")])
def test_a_weight_has_one_change(base, tmp_path, again, expected):
    """Which of two would have been taken was said nowhere."""
    name = "model.layers.0.self_attn.q_proj"
    rows, columns = weights(base)[f"{name}.weight"].shape
    made = peft({name: (random(RANK, columns), random(rows, RANK))})
    own = adapter(tmp_path / "adapter", made | {again(name): each + 1 for name, each in made.items()})
    with pytest.raises(EffllmError) as refused:
        merged(base, own, tmp_path / "out")
    assert expected in refused.value.message


def test_usual_patterns_are_quick():
    for usual in ("q_proj", "model.layers.0.mlp.up_proj", r".*layers\.[0-9]+\..*", "(q|k|v)_proj", r"layers\.(1|2)\.(mlp|self_attn)\..*"):
        assert is_quick(usual)


def test_matrices_in_words_are_refused(base, tmp_path):
    own = adapter(tmp_path / "adapter", {name: each.to(torch.int32) for name, each in peft(matrices(base)).items()})
    with pytest.raises(EffllmError, match="as I32, which cannot be merged"):
        merged(base, own, tmp_path / "out")


def test_a_head_that_is_the_embeddings(tmp_path):
    saved(Case("llama", {"tie_word_embeddings": True}), base := tmp_path / "base")
    table = weights(base)["model.embed_tokens.weight"]
    both = {f"{PREFIX}{name}.weight": table + 1 for name in ("lm_head", "model.embed_tokens")}
    merged(base, adapter(tmp_path / "both", both), tmp_path / "out")
    assert_is(base, tmp_path / "out", {"model.embed_tokens.weight": table.double() + 1})
    alone = adapter(tmp_path / "alone", {f"{PREFIX}lm_head.weight": table})
    with pytest.raises(EffllmError) as refused:
        merged(base, alone, tmp_path / "other")
    assert "output head is tied" in refused.value.hint


def test_from_the_command_line_to_a_run(user, tmp_path):
    own = weights(Path(merging.__file__).parents[2] / "models" / "fable")
    name = "model.layers.2.mlp.down_proj"
    rows, columns = own[f"{name}.weight"].shape
    tuned = adapter(tmp_path / "tuned", peft({name: (random(RANK, columns), random(rows, RANK))}))
    told = user.run("export", "fable", "-o", tmp_path / "out", "--lora", tuned)
    assert told.code == 0 and f"1 of {len(own)} tensors changed" in told.err
    assert user.run("run", tmp_path / "out", "Once", "--raw", "-n", "3").code == 0
    with TensorStore.open(tmp_path / "out") as store:
        assert len(store.tensors) == len(own)
    again = user.run("export", "fable", "-o", tmp_path / "out", "--lora", tuned)
    assert again.code == 2 and "exists" in again.err
    assert user.run("export", "fable", "-o", tmp_path / "x", "--lora", tuned, "--type", "Q4_0").code == 2
    assert "holds no LoRA adapter" in user.run("export", "fable", "-o", tmp_path / "x", "--lora", tmp_path).err
    assert "does not exist" in user.run("export", "fable", "-o", tmp_path / "x", "--lora", tmp_path / "absent.gguf").err
    small = tmp_path / "small"
    assert user.run("quantize", tmp_path / "out", "-o", small, "--bits", "4").code == 0
    told = user.run("export", small, "-o", tmp_path / "x", "--lora", tuned)
    assert told.code == 2 and "is quantized" in told.err
    assert "--lora" in user.run("run", tuned, "x").err + user.run("show", tuned).err


@pytest.mark.parametrize("tensors", [
    lambda table: {"model.embed_tokens.weight": table + 1},
    lambda table: {"model.embed_tokens.weight": table + 1, "lm_head.weight": table + 2},
    lambda table: {"model.embed_tokens.lora_embedding_A": random(RANK, len(table)), "model.embed_tokens.base_layer.weight": table,
                   "model.embed_tokens.lora_embedding_B": random(table.shape[1], RANK)}], ids=["alone", "apart", "by two matrices"])
def test_a_table_that_was_trained_without_the_head_that_it_is(tmp_path, tensors):
    """PEFT leaves the head unchanged there, unless it is told to keep them tied."""
    saved(Case("llama", {"tie_word_embeddings": True}), base := tmp_path / "base")
    own = {f"{PREFIX}{name}": each for name, each in tensors(weights(base)["model.embed_tokens.weight"]).items()}
    with pytest.raises(EffllmError, match="not the tied output head in the same way") as refused:
        merged(base, adapter(tmp_path / "adapter", own), tmp_path / "out")
    assert "ensure_weight_tying" in refused.value.hint and "; it names 'org/base'" in refused.value.hint
    if "lm_head" not in str(own):
        assert merged(base, adapter(tmp_path / "tied", own, ensure_weight_tying=True), tmp_path / "out").changed == 1


def test_a_head_that_was_trained_with_its_table(tmp_path):
    saved(Case("llama", {"tie_word_embeddings": True}), base := tmp_path / "base")
    table = weights(base)["model.embed_tokens.weight"]
    a, b = random(RANK, len(table)), random(table.shape[1], RANK)
    own = {"model.embed_tokens.lora_embedding_A": a, "model.embed_tokens.lora_embedding_B": b, "lm_head.lora_A.weight": b.T.clone(),
           "lm_head.lora_B.weight": a.T.clone(), "model.embed_tokens.base_layer.weight": table, "lm_head.base_layer.weight": table.clone()}
    own = adapter(tmp_path / "adapter", {f"{PREFIX}{name}": each for name, each in own.items()}, ensure_weight_tying=True)
    assert merged(base, own, tmp_path / "out").changed == 1
    assert_is(base, tmp_path / "out", {"model.embed_tokens.weight": table.double() + 2.5 * (b.double() @ a.double()).T})


def assert_changes_a_query(base: Path, part: str, called, tmp_path: Path) -> None:
    """An adapter of the first layer's queries in a part of the model, under the name that a program has for them, changes those alone."""
    name = next(each for each in weights(base) if each.endswith("layers.0.self_attn.q_proj.weight") and part in each)
    rows, columns = weights(base)[name].shape
    a, b = random(RANK, columns), random(rows, RANK)
    merged(base, adapter(tmp_path / "adapter", peft({called(name): (a, b)})), tmp_path / "out")
    assert_is(base, tmp_path / "out", {name: weights(base)[name].double() + 2.5 * (b.double() @ a.double())})


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "model."])
@pytest.mark.parametrize("family", ["gemma3_text", "mistral"])
def test_of_layers_of_text_and_of_images_those_of_the_text(tmp_path, family, prefix):
    """Both have matrices of the same names, and programs turn the words before round."""
    saved(Case(family, images=True), base := tmp_path / "base")
    assert_changes_a_query(base, "language_model", lambda name: f"{prefix}layers.0.self_attn.q_proj", tmp_path)


def test_matrices_of_layers_of_images(tmp_path):
    saved(Case("gemma3_text", images=True), base := tmp_path / "base")
    assert_changes_a_query(base, "vision", lambda name: f"model.{name.removeprefix('model.').removesuffix('.weight')}", tmp_path)


def test_blocks_of_a_number_that_the_model_does_not_have(tmp_path):
    """Where they are not called layers their number is among the words before."""
    saved(Case("qwen3_5_text", DELTA, images=True), base := tmp_path / "base")
    name = next(each for each in weights(base) if ".blocks.0." in each and each.endswith("attn.qkv.weight")).removesuffix(".weight")
    rows, columns = weights(base)[f"{name}.weight"].shape
    pair = random(RANK, columns), random(rows, RANK)
    other = adapter(tmp_path / "other", peft({name.replace(".blocks.0.", ".blocks.9."): pair}))
    with pytest.raises(EffllmError, match="blocks.9.attn.qkv.weight', which the model does not have"):
        merged(base, other, tmp_path / "out")
    assert merged(base, adapter(tmp_path / "own", peft({f"base.{name}": pair})), tmp_path / "out").changed == 1


def test_a_run_with_another_alpha_does_not_continue_with_what_was_stopped(base, tmp_path):
    pairs = matrices(base)
    steps = merge(base, adapter(tmp_path / "adapter", peft(pairs)), tmp_path / "out")
    for _ in range(len(weights(base)) - 1):
        next(steps)
    steps.close()
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(path.read_text().replace('"lora_alpha": 10', '"lora_alpha": 2'))
    merged(base, tmp_path / "adapter", tmp_path / "out")
    assert_is(base, tmp_path / "out", added(base, pairs, 2 / RANK))


def test_the_tokenizer_that_an_adapter_was_trained_with(base, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(base, source)
    (source / "tokenizer.json").write_text("1")
    (source / "vocab.json").write_text("{}")
    (source / "tokenizer_config.json").write_text('{"chat_template": "old"}')
    own = adapter(tmp_path / "adapter", peft(matrices(base)))

    def texts(out: str) -> tuple[dict[str, str], bool]:
        events = [*merge(source, own, tmp_path / out)]
        return ({path.name: path.read_text() for path in (tmp_path / out).iterdir() if path.name.startswith(("tok", "chat", "voc"))},
                any(isinstance(each, Notice) and "adapter's folder" in each.text for each in events))

    before = {"tokenizer.json": "1", "vocab.json": "{}", "tokenizer_config.json": '{"chat_template": "old"}'}
    (own / "tokenizer_config.json").write_text("{}")
    assert texts("settings alone") == (before, False)
    (own / "tokenizer.json").write_text("2")
    assert texts("no template") == (before, False)
    (own / "chat_template.jinja").write_text("new")
    after = {"tokenizer.json": "2", "tokenizer_config.json": "{}", "chat_template.jinja": "new"}
    assert texts("whole") == (after, True)
