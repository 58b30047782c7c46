"""Trained drafters for another model, damaged, or with an invalid config: one line with a next step."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from drafter_models import VOCABULARY, Head, with_assistant, with_head
from safetensors.torch import load_file, save_file
from test_drafters import opened, planned

from effllm import EffllmError, UsageError
from effllm.offload.checkpoint import CheckpointError


@pytest.fixture(scope="module")
def assistant(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, object]:
    base = tmp_path_factory.mktemp("assistant")
    return base, with_assistant(base)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Head]:
    base = tmp_path_factory.mktemp("head")
    return base, with_head(base)


def retold(base: Path, to: Path, part: str, **stated: object) -> Path:
    """A copy with changes in the config of the model or the draft; in its `text_config` where it has one."""
    shutil.copytree(base, to)
    path = to / part / "config.json"
    raw = json.loads(path.read_text())
    raw.get("text_config", raw).update({key: value for key, value in stated.items() if key in raw.get("text_config", raw)})
    raw.update({key: value for key, value in stated.items() if "text_config" not in raw or key in raw and key not in raw["text_config"]})
    path.write_text(json.dumps(raw))
    return to


def test_a_draft_for_another_model_is_refused_in_one_line(assistant: tuple[Path, object], head: tuple[Path, Head], tmp_path: Path) -> None:
    stated = {"hidden": (assistant[0], {"backbone_hidden_size": 128}, "a hidden size of 128, this one has 64"),
              "heads": (assistant[0], {"head_dim": 32}, r"key-value heads and their size of \(2, 32\), this one has \(2, 16\)"),
              "layers": (head[0], {"eagle_aux_hidden_state_layer_ids": [2, 3, 6]}, "more layers than 6, this one has 6"),
              "width": (head[0], {"target_hidden_size": 128}, "a hidden size of 128, this one has 64")}
    for name, (base, more, said) in stated.items():
        with pytest.raises(UsageError, match=f"^the draft model .* was trained for a model with {said}"):
            planned(retold(base, tmp_path / name, "draft", **more))
    (tmp_path / "crossed").mkdir()
    for one, other, said in ((assistant[0], head[0], "the family gemma4, this one has llama"),
                             (head[0], assistant[0], r"one stream and embeddings as they are stored, this one has others \(gemma4_text\)")):
        crossed = tmp_path / "crossed" / one.name
        shutil.copytree(other / "model", crossed / "model")
        shutil.copytree(one / "draft", crossed / "draft")
        with pytest.raises(UsageError, match=said):
            planned(crossed)
        left = planned(crossed, from_settings=frozenset({"draft"}))
        assert left.speculation.draft is None and left.speculation.lookup
        assert any("ignored, since it is a setting for all models" in each for each in left.notices)
    with pytest.raises(UsageError, match="which must then all stay in memory; --kv-ram puts some on the disk"):
        planned(assistant[0], kv_ram="1M")


def test_a_draft_that_is_damaged_is_named(assistant: tuple[Path, object], head: tuple[Path, Head], tmp_path: Path) -> None:
    def changed(base: Path, name: str, change: Callable[[dict], object]) -> Path:
        to = tmp_path / name
        shutil.copytree(base, to)
        path = to / "draft" / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)
        return to

    order = "masked_embedding.token_ordering"
    for base, name, change, said in (
            (assistant[0], "missing", lambda found: found.pop("pre_projection.weight"), "pre_projection.weight is missing"),
            (assistant[0], "order", lambda found: found.pop(order), f"{order} is missing"),
            (head[0], "map", lambda found: found.update(d2t=found["d2t"][:7].clone()), r"d2t is I64 \[7\]"),
            (head[0], "narrower", lambda found: found.update({"fc.weight": found["fc.weight"][:, :64].clone()}), "fc.weight has shape")):
        with pytest.raises(CheckpointError, match=f"^the draft model: .*{said}"):
            planned(changed(base, name, change))
    for base, name, change, said in ((assistant[0], "twice", lambda found: found[order].zero_(), "does not name every token once"),
                                     (head[0], "beyond", lambda found: found["d2t"].add_(VOCABULARY), "tokens that the model does not")):
        with pytest.raises(CheckpointError, match=said):
            opened(changed(base, name, change))


@pytest.mark.parametrize("stated, said", (
    ({"use_ordered_embeddings": True, "num_centroids": 7}, "num_centroids 7 does not divide the vocabulary of 300"),
    ({"backbone_hidden_size": "wide"}, "backbone_hidden_size is 'wide'"), ({"enable_moe_block": True}, "enable_moe_block of a draft")))
def test_odd_configs_of_assistants_are_refused(assistant: tuple[Path, object], tmp_path: Path, stated: dict[str, object],
                                               said: str) -> None:
    with pytest.raises(EffllmError, match=said):
        planned(retold(assistant[0], tmp_path / "odd", "draft", **stated))


@pytest.mark.parametrize("stated, said", (
    ({"num_hidden_layers": 9}, "of 9 layers is not supported"), ({"num_hidden_layers": 2}, "layers.1.* is missing"),
    ({"draft_vocab_size": 400}, "draft_vocab_size"),
    ({"eagle_aux_hidden_state_layer_ids": ["low"]}, "expected layer indices"), ({"model_type": "mixtral"}, "of a 'mixtral' layer"),
    ({"norm_before_fc": "yes"}, "norm_before_fc is 'yes', expected true or false"),
    ({"eagle_config": {"norm_before_fc": True}}, "input_norm.weight is missing")))
def test_odd_configs_of_heads_are_refused(head: tuple[Path, Head], tmp_path: Path, stated: dict[str, object], said: str) -> None:
    with pytest.raises(EffllmError, match=said):
        planned(retold(head[0], tmp_path / "odd", "draft", **stated))
