"""A quantized model keeps its vision tower unquantized, in a file that is verified, replaced and rebuilt like the others."""

from pathlib import Path

import numpy as np
import pytest
from conversions import options
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from vision_models import FIRST, PICTURES, TOWER, open_encoder, save_random_model

from effllm import EffllmError
from effllm.offload.checkpoint import TensorStore
from effllm.runtime.catalog import ModelRef
from effllm.runtime.conversion.on_load import Request, quantize_on_load
from effllm.runtime.convert import Converted, convert
from effllm.runtime.events import Notice, Progress
from effllm.runtime.files import model_folder_files
from effllm.runtime.images import EncodingJob
from effllm.runtime.library.verify import Verified, verify

FABLE = Path(__file__).resolve().parent.parent / "models" / "fable"
ROWS = [f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)]
WORDS = ["<image>", "<fake_token_around_image>", "<global-img>", *ROWS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_idefics3(tmp_path_factory.mktemp("sees") / "whole")


def save_idefics3(folder: Path) -> Path:
    """A small vision-language model, created in `folder`."""
    save_random_model("idefics3", folder, {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "head_dim": 32}, TOWER, WORDS,
                      image_token_id=FIRST, pad_token_id=0)
    Idefics3ImageProcessorPil(size={"longest_edge": 128}, max_image_size={"longest_edge": 32}).save_pretrained(folder)
    return folder


def quantized(folder: Path, out: Path, **more: object) -> list[object]:
    return list(convert(folder, out, options(**more)))


def test_it_sees_the_same(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "small"
    *said, result = quantized(folder, out)
    assert isinstance(result, Converted)
    assert [each for each in said if isinstance(each, Progress) and each.phase == "copying the vision and audio towers"][-1].done > 0
    assert not [each for each in said if isinstance(each, Notice) and "takes images too" in each.text]
    first, second = (open_encoder(each).encode(PICTURES["photo"], EncodingJob()) for each in (folder, out))
    assert np.array_equal(first.rows, second.rows) and first.tokens == second.tokens
    with TensorStore.of_file(out / model_folder_files.TOWER) as kept, TensorStore.open(folder) as whole:
        assert kept.tensors and all(np.array_equal(kept.read(info), whole.read(whole.tensors[name])) for name, info in kept.tensors.items())
    assert open_encoder(out).bytes_needed() == open_encoder(folder).bytes_needed()


def test_it_is_verified_and_replaced(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "small"
    quantized(folder, out)
    assert not list(verify(out))[-1].damaged
    with (out / model_folder_files.TOWER).open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    found = list(verify(out))[-1]
    assert isinstance(found, Verified) and found.damaged == (model_folder_files.TOWER,)
    quantized(folder, out, replace=True)  # nothing in the folder is a stranger's
    assert not list(verify(out))[-1].damaged


def test_one_made_without_says_so(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "small"
    quantized(folder, out, tower=False)
    with pytest.raises(EffllmError, match="holds only the text model") as caught:
        open_encoder(out)
    assert "the original folder" in caught.value.hint


def test_a_run_leaves_it_where_it_is(folder: Path, tmp_path: Path) -> None:
    reference = ModelRef(str(folder), folder)
    for keep_it in (False, True):
        out = tmp_path / str(keep_it)
        list(quantize_on_load(Request(reference, "4bit", tmp_path, keep_it), out))
        assert (out / model_folder_files.TOWER).exists() == keep_it


def test_models_of_text_have_no_such_file(tmp_path: Path) -> None:
    quantized(FABLE, tmp_path / "small")
    assert not (tmp_path / "small" / model_folder_files.TOWER).exists()
