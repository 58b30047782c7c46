"""Vision towers derived from another family's: pixel values, rows and tokens are transformers'."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import PreTrainedModel
from transformers.models.glm5_next.image_processing_pil_glm5_next import smart_resize
from vision_cases import CASES
from vision_models import FIRST, PICTURES, assert_encodes_as, change_config, open_encoder, save_vision_model

from effllm import EffllmError
from effllm.runtime.images import ROW_PLACEHOLDER, EncodingJob
from effllm.runtime.images.glm5_next import Glm5Next
from effllm.runtime.images.video_file import Frame

FAMILIES = ("cohere_compass", "exaone4_5", "glm5_next", "mistral_large4")


@pytest.fixture(scope="module", params=FAMILIES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("later") / "folder"
    return request.param, folder, save_vision_model(folder, request.param, CASES[request.param])


@pytest.mark.parametrize("name", PICTURES)
def test_values_rows_and_tokens(made: tuple[str, Path, PreTrainedModel], name: str) -> None:
    family, folder, model = made
    sight, picture = open_encoder(folder), PICTURES[name]
    ready = CASES[family][-1](picture, input_data_format="channels_last", return_tensors="pt")
    values = sight.values(picture)
    if family == "mistral_large4":
        assert np.array_equal(values.transpose(2, 0, 1), ready["pixel_values"][0].numpy())
    else:  # of both frames that are seen as one
        cut = ready["pixel_values"].numpy().reshape(len(values[0]), 3, 2, -1)
        assert all(np.array_equal(values[0], cut[:, :, frame].reshape(len(cut), -1)) for frame in (0, 1))
    if (family, name) == ("mistral_large4", "tiny"):  # of which transformers makes one row that it cannot split
        assert sight.encode(picture, EncodingJob()).tokens == (ROW_PLACEHOLDER, FIRST + 2)
        return
    seen = assert_encodes_as(sight, picture, model, dict(ready))
    assert (seen.grid is None) is (family != "cohere_compass")
    assert (seen.deepstack_rows is not None) is (family == "cohere_compass")


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 60), st.integers(60, 9000))
def test_sizes_are_those_of_its_processor(height: int, width: int, least: int, most: int) -> None:
    assume(max(height, width) < 200 * min(height, width))
    sight = object.__new__(Glm5Next)
    sight.unit, sight.least, sight.most = 28, least * 28**2, most * 28**2
    assert sight.sized(height, width) == smart_resize(2, height, width, min_pixels=least, max_pixels=most)


def test_a_video_has_no_mrope_positions_where_a_text_has_one_position_per_token(tmp_path: Path) -> None:
    save_vision_model(tmp_path, "exaone4_5", CASES["exaone4_5"])
    sight = open_encoder(tmp_path)
    (words, film, apart), = sight.video_inputs([Frame(float(second), PICTURES["photo"]) for second in range(3)])
    seen = sight.encode(film, EncodingJob())
    assert not words and seen.grid is None and seen.positions_per_second is None and len(film) == 4 and apart
    assert seen.tokens == (ROW_PLACEHOLDER,) * sight.token_count(*film.shape[:3]) and len(seen.rows) == len(seen.tokens)


@pytest.mark.parametrize(("family", "changes", "said"), [
    ("exaone4_5", {"num_key_value_heads": 2}, "num_key_value_heads is 2"), ("glm5_next", {"swiglu_limit": 0}, "swiglu_limit is 0"),
    ("cohere_compass", {"deepstack_visual_indexes": [7]}, "deepstack_visual_indexes")])
def test_what_is_not_known_is_refused(family: str, changes: dict[str, object], said: str, tmp_path: Path) -> None:
    save_vision_model(tmp_path, family, CASES[family])
    vision = {**json.loads((tmp_path / "config.json").read_text())["vision_config"], **changes}
    change_config(tmp_path, "config.json", vision_config=vision)
    with pytest.raises(EffllmError, match=said) as raised:
        open_encoder(tmp_path).encode(PICTURES["square"], EncodingJob())
    assert "\n" not in raised.value.message
