"""`effllm export --mmproj`: the same vision file as another writer's, and reading it gives the folder's results."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from command_line import run_cli
from mmproj_files import PAIRS, VISION_CASES, save_as_published, write_pair
from vision_cases import CASES
from vision_models import PICTURES, open_encoder, save_vision_model

from effllm.runtime.config import read_config
from effllm.runtime.gguf.projector_export import PROJECTOR_TYPES
from effllm.runtime.images import VISION_ENCODERS, EncodingJob
from effllm.runtime.images.media import open_media
from effllm.runtime.images.modality import IMAGE_INPUT as SEEN

FAMILIES = [family for family in VISION_CASES if family in PAIRS and family in PROJECTOR_TYPES]


@pytest.fixture(scope="module", params=FAMILIES)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path, Path]:
    """A vision model's folder, its two files by another writer, and ours."""
    place = tmp_path_factory.mktemp("written")
    folder = place / "folder"
    save_as_published(folder, request.param)
    model, theirs = write_pair(folder, place / "files")
    ours = place / "mmproj-ours.gguf"
    code, out, err = run_cli("export", folder, "-o", ours, "--mmproj", "--json")
    assert code == 0, err
    assert json.loads(out)["file"] == str(ours)
    return folder, model, theirs, ours


def test_tensors_and_keys_are_those_of_another_writer(written: tuple[Path, Path, Path, Path]) -> None:
    ours, theirs = (gguf.GGUFReader(path) for path in (written[3], written[2]))
    values = [{each.name.replace("model.image_newline", "v.image_newline").replace("attn_post_norm", "ln2"):  # as others call them
               gguf.quants.dequantize(each.data, each.tensor_type).reshape(each.shape[::-1]) for each in file.tensors}
              for file in (ours, theirs)]
    assert values[0].keys() == values[1].keys()
    for name, wanted in values[1].items():
        assert values[0][name].shape == wanted.shape and np.abs(values[0][name] - wanted).max() <= 5e-4 * np.abs(wanted).max(), name
    said = [{key: field.contents() for key, field in file.fields.items() if key.startswith("clip.")} for file in (ours, theirs)]
    wrong = {key: (said[0].get(key), value) for key, value in said[1].items() if said[0].get(key) != value}
    assert not wrong


def test_what_is_read_from_it_sees_nearly_as_the_folder(written: tuple[Path, Path, Path, Path]) -> None:
    folder, model, _, ours = written
    sight, wanted = open_media(model, read_config(model), str(ours)).encoders[SEEN], open_encoder(folder)
    for name in ("photo", "tall"):
        found, theirs = sight.encode(PICTURES[name], EncodingJob()), wanted.encode(PICTURES[name], EncodingJob())
        assert found.tokens == theirs.tokens and found.grid == theirs.grid
        assert np.abs(found.rows - theirs.rows).max() < 5e-3 * np.abs(theirs.rows).max()


@pytest.mark.peer
@pytest.mark.slow
@pytest.mark.parametrize("family", ["idefics3", "gemma3", "glm4v", "glm4v_moe", "kimi_k25", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_llamacpp_sees_the_same_in_a_pair(family: str, tmp_path: Path) -> None:
    """Also that the text model is of an architecture that the other goes with."""
    peer = pytest.importorskip("llama_cpp")
    from test_projector_end_to_end import OTHER, of_llamacpp

    folder, model = tmp_path / "folder", tmp_path / "model.gguf"
    save_as_published(folder, family, **OTHER.get(family, {}))
    points = PICTURES["square"] if "qwen" in family else np.ascontiguousarray(PICTURES["square"][:32, :32])
    points = np.tile(PICTURES["square"], (5, 5, 1)) if "glm" in family else points
    assert run_cli("export", folder, "-o", model)[0] == run_cli("export", folder, "-o", tmp_path / "mmproj.gguf", "--mmproj")[0] == 0
    rows, _ = of_llamacpp(peer, model, tmp_path / "mmproj.gguf", points)
    wanted = open_encoder(folder).encode(points, EncodingJob())
    if wanted.deepstack_rows is not None:
        rows = np.split(rows, 1 + len(wanted.deepstack_rows), axis=1)[0]
    assert rows.shape == wanted.rows.shape and np.abs(rows - wanted.rows).max() < 1e-2 * np.abs(wanted.rows).max()


def siglip(folder: Path, layers: list[int], strategy: str) -> None:
    """A LLaVA-NeXT whose tower has no row before its patches."""
    text, tower, words, more, processor = CASES["llava_next"]
    save_vision_model(folder, "llava_next", (text, {**tower, "model_type": "siglip_vision_model", "vision_use_head": False}, words,
                                             {**more, "vision_feature_layer": layers, "vision_feature_select_strategy": strategy},
                                             processor))


def test_several_layers_of_a_tower_without_a_first_row_come_back(tmp_path: Path) -> None:
    folder, out = tmp_path / "folder", tmp_path / "files" / "mmproj.gguf"
    siglip(folder, [-3, -2], "full")
    model, _ = write_pair(folder, tmp_path / "files")
    assert run_cli("export", folder, "-o", out, "--mmproj")[0] == 0
    assert {each.name.split(".")[2] for each in gguf.GGUFReader(out).tensors if ".blk." in each.name} == {"0", "1"}  # of three layers
    beside, = open_media(model, read_config(model), str(out)).encoders.values()
    found, wanted = (sight.encode(PICTURES["tall"], EncodingJob()) for sight in (beside, open_encoder(folder)))
    assert found.tokens == wanted.tokens and np.abs(found.rows - wanted.rows).max() < 5e-3 * np.abs(wanted.rows).max()


def test_a_strategy_that_such_a_file_cannot_say_is_refused(tmp_path: Path) -> None:
    siglip(tmp_path / "folder", [-2], "default")
    code, _, err = run_cli("export", tmp_path / "folder", "-o", tmp_path / "mmproj.gguf", "--mmproj")
    assert code == 2 and "unusual feature strategy" in err and len(err.splitlines()) <= 3


@pytest.mark.peer
@pytest.mark.slow
def test_llamacpp_sees_the_same_with_layers_in_the_middle(tmp_path: Path) -> None:
    """Rows of the whole image: it does not join tiles. Of towers with a row before the patches it puts that last."""
    peer = pytest.importorskip("llama_cpp")
    from test_projector_end_to_end import of_llamacpp

    folder, out = tmp_path / "folder", tmp_path / "mmproj.gguf"
    siglip(folder, [-3, -2], "full")
    model, _ = write_pair(folder, tmp_path / "files")
    assert run_cli("export", folder, "-o", out, "--mmproj")[0] == 0
    points = np.ascontiguousarray(PICTURES["square"][:32, :32])
    rows, _ = of_llamacpp(peer, model, out, points)
    wanted = open_encoder(folder).encode(points, EncodingJob()).rows[:16]
    assert np.abs(rows[:16] - wanted).max() < 1e-2 * np.abs(wanted).max()


def test_an_export_of_the_text_part_says_how_to_have_the_other(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    save_vision_model(folder, "idefics3", CASES["idefics3"])
    code, _, err = run_cli("export", folder, "-o", tmp_path / "small.gguf")
    assert code == 0 and f"effllm export {folder} -o {tmp_path / 'mmproj-small.gguf'} --mmproj" in err
    assert run_cli("export", folder, "-o", tmp_path / "mmproj-small.gguf", "--mmproj")[0] == 0
    model = tmp_path / "small.gguf"  # and both files are found and belong together
    assert open_media(model, read_config(model)).encoders[SEEN].encode(PICTURES["photo"], EncodingJob()).rows.shape[1] == 48


@pytest.mark.parametrize(("family", "arch"), [("glm4v", "glm4"), ("glm4v_moe", "glm4moe"), ("qwen2_5_vl", "qwen2vl"),
                                              ("qwen3_vl", "qwen3vl"), ("minicpmv4_6", "qwen35")])
def test_both_exports_are_a_pair_that_answers_as_the_folder(family: str, arch: str, tmp_path: Path) -> None:
    """Positions of an image are those by place, which the text model's file states; and so does a file that is made of that file."""
    from test_projector_end_to_end import hold_a_picture, in_halves

    folder, model = tmp_path / "folder", tmp_path / "small.gguf"
    transformer = save_as_published(folder, family)
    assert run_cli("export", folder, "-o", model)[0] == run_cli("export", folder, "-o", tmp_path / "mmproj.gguf", "--mmproj")[0] == 0
    (tmp_path / "again").mkdir()
    again = tmp_path / "again" / "small.gguf"
    assert run_cli("export", model, "-o", again)[0] == 0
    stated = [{key: field.contents() for key, field in gguf.GGUFReader(path).fields.items() if "rope" in key or "architecture" in key}
              for path in (model, again)]
    assert stated[0] == stated[1] and stated[0]["general.architecture"] == arch and f"{arch}.rope.dimension_sections" in stated[0]
    (tmp_path / "again" / "mmproj.gguf").symlink_to(tmp_path / "mmproj.gguf")
    in_halves(transformer, ("",))
    for path in (model, again):
        hold_a_picture(path, family, transformer)


def test_models_and_options_without_such_a_file_are_refused_in_one_line(tmp_path: Path) -> None:
    assert set(PROJECTOR_TYPES) <= set(VISION_ENCODERS)
    folder = tmp_path / "folder"
    save_vision_model(folder, "ovis2", CASES["ovis2"])
    out = tmp_path / "mmproj.gguf"
    for more, line in (((), "of ovis2 models no mmproj file is written"), (("--type", "Q8_0"), "--mmproj writes a GGUF file of type F16"),
                       (("--format", "compressed-tensors"), "--mmproj writes a GGUF file of type F16")):
        code, _, err = run_cli("export", folder, "-o", out, "--mmproj", *more)
        assert code == 2 and line in err and len(err.splitlines()) <= 3 and not out.exists()
    code, _, err = run_cli("export", "fable", "-o", out, "--mmproj")
    assert code == 2 and "takes neither images" in err
