"""Vision models in a single file, as Ollama's own converter writes them: logits, with and without an image, against transformers'."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from gguf_bytes import KEYS, SHAPES, file, small_model, tensor, text, typed
from hub_user import HubUser
from library_trees import OllamaTree
from ollama_files import WRITTEN, write_one
from PIL import Image
from test_projector_end_to_end import hold_a_picture
from vision_cases import CASES
from vision_models import PICTURES, save_vision_model

from effllm.offload.safetensors_header import CheckpointError
from effllm.runtime.config import read_config
from effllm.runtime.gguf.ollama_layout import OLLAMA_VISION
from effllm.runtime.gguf.projector_names import PROJECTORS
from effllm.runtime.gguf.store import open_gguf_store, read_header
from effllm.runtime.images.media import open_media

QUICK = "gemma3"


@pytest.mark.parametrize("family", [pytest.param(family, marks=() if family == QUICK else pytest.mark.slow) for family in WRITTEN])
def test_logits_after_an_image_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    transformer = save_vision_model(tmp_path / "folder", family, CASES[family], **({"hidden_act": "silu"} if family == "mistral3" else {}))
    model = write_one(tmp_path / "folder", tmp_path / "files")
    hold_a_picture(model, family, transformer)


def test_what_is_not_known_to_see_runs_as_text_and_says_so(tmp_path: Path) -> None:
    extra = ("v.blk.0.attn_q.weight", "mm.0.weight")
    keys = {"llama.vision.block_count": 1, "llama.vision.image_size": 28}
    (tmp_path / "m.gguf").write_bytes(with_towers(keys, extra))
    config = read_config(tmp_path / "m.gguf")
    assert any("2 tensors for images or audio" in each for each in config.warnings) and len(config.warnings) == 1
    with open_gguf_store(tmp_path / "m.gguf") as store:
        assert not any(name.startswith(("v.", "mm.")) for name in store.tensors) and "model.norm.weight" in store.tensors
    (tmp_path / "odd.gguf").write_bytes(with_towers({}, extra))
    with pytest.raises(CheckpointError, match="which no llama model has"):
        open_gguf_store(tmp_path / "odd.gguf")


def with_towers(keys: Mapping[str, object], names: Sequence[str]) -> bytes:
    pairs, at, tensors = [text(key) + typed(value) for key, value in {**KEYS, **keys}.items()], 0, []
    for name, shape in {**SHAPES, **dict.fromkeys(names, (8, 8))}.items():
        tensors.append(tensor(name, shape, 0, at))
        at += -(-4 * int(np.prod(shape)) // 32) * 32
    return file(pairs, tensors, at)


def test_gemma_by_its_older_keys_has_the_positions_of_the_newer(tmp_path: Path) -> None:
    """What a file leaves out is what Ollama takes for granted of Gemma 3."""
    keys = {key.replace("llama.", "gemma3."): value for key, value in KEYS.items() if "rms_epsilon" not in key}
    keys |= {"general.architecture": "gemma3", "gemma3.rope.local.freq_base": 20000.0, "gemma3.rope.global.freq_base": 500000.0,
             "gemma3.attention.sliding_window": 16, "gemma3.attention.key_length": 4, "gemma3.block_count": 26,
             "gemma3.final_logit_softcapping": 30.0}
    (tmp_path / "m.gguf").write_bytes(small_model({**dict.fromkeys(KEYS), **keys}))
    config = read_config(tmp_path / "m.gguf")
    thetas = {rope.theta for rope in config.ropes}
    assert thetas == {20000.0, 500000.0} and config.norm_eps == 1e-6 and not config.warnings


def test_tables_name_what_projectors_have() -> None:
    for name, found in OLLAMA_VISION.items():
        projector = PROJECTORS[found.projector_type]
        assert set(found.layer_names.values()) <= projector.layer_names.keys(), name
        known = projector.outer_names.keys() | {each.removesuffix(".weight") for each in projector.full_names}
        assert set(found.outer_names.values()) <= known


def test_models_of_ollamas_library_see_by_a_layer_or_by_themselves(tmp_path: Path) -> None:
    save_vision_model(tmp_path / "folder", QUICK, CASES[QUICK])
    whole = write_one(tmp_path / "folder", tmp_path / "files").read_bytes()
    text, projector = ((tmp_path / "files" / name).read_bytes() for name in ("model-Q8_0.gguf", "mmproj-model-f16.gguf"))
    user, tree = HubUser(tmp_path, "http://127.0.0.1:9"), OllamaTree(tmp_path / ".ollama" / "models")
    asks = "<start_of_turn>user\n{{ .Prompt }}<end_of_turn>"
    tree.add("pair", text, projector=projector, template=asks)
    tree.add("one", whole, template=asks)
    tree.add("blind", text)
    Image.fromarray(PICTURES["photo"]).save(tmp_path / "photo.png")
    shown = {name: user.run("show", f"ollama:{name}", "--json").json["images"] for name in ("pair", "one", "blind")}
    assert shown["pair"] == shown["one"] is not None and shown["blind"] is None
    for _ in range(2):  # from headers, then from what they told
        takes = {row["name"]: row["input_modalities"] for row in user.run("list", "--json").json["models"]}
        assert takes == {"fable": ["text"], "ollama:pair": ["text", "image"], "ollama:one": ["text", "image"], "ollama:blind": ["text"]}
    tree.blob(projector).write_bytes(b"GGUF of another kind")
    rows = user.run("list", "--json").json["models"]
    assert not [row for row in rows if row["name"] == "ollama:pair" and "image" in row["input_modalities"]]
    tree.blob(projector).write_bytes(projector)
    said = [user.run("run", f"ollama:{name}", "fox", "-n", "3", "--temp", "0", "--image", tmp_path / "photo.png")
            for name in ("pair", "one")]
    assert [each.code for each in said] == [0, 0] and all("image of 160 × 120: 20 tokens" in each.err for each in said), said
    assert "using that of Gemma" in said[1].err and "that of Gemma" not in said[0].err, "whose file has a template itself"


def test_a_stated_tower_without_numbers_is_refused_for_images_alone(tmp_path: Path) -> None:
    save_vision_model(tmp_path / "folder", "gemma3", CASES["gemma3"])
    model = write_one(tmp_path / "folder", tmp_path / "files", **{"vision.patch_size": "x"})
    config = read_config(model)
    assert read_header(model).sees and not open_media(model, config).encoders
    user = HubUser(tmp_path, "http://127.0.0.1:9")
    assert json.loads(user.run("show", model, "--json").out)["images"] is None
