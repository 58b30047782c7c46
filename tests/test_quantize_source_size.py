"""The source size that `quantize` reports: the bytes of its files, whatever type they are widened to when read."""

import json
from pathlib import Path

import pytest
from gguf_samples import fable_gguf
from test_imported import written
from test_mxfp4 import packed_model

from effllm.offload.checkpoint import TensorStore
from effllm.runtime.conversion.convert_plan import plan_conversion
from effllm.runtime.convert import Converted, ConvertOptions, convert, recipe_of
from effllm.runtime.gguf.store import read_header


def of_files(model: Path) -> int:
    """Bytes of the tensors, as their headers say."""
    if model.is_file():
        return sum(tensor.nbytes for tensor in read_header(model).tensors.values())
    with TensorStore.open(model) as store:
        return store.nbytes


@pytest.fixture(params=("Q8_0", "Q4_0", "F16", "awq", "int4", "fp8 blocks", "fp8, one scale", "modelopt nvfp4", "mxfp4"))
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    place = tmp_path / "source"
    if request.param == "mxfp4":
        packed_model(place)
    elif request.param in ("Q8_0", "Q4_0", "F16"):
        place = tmp_path / "source.gguf"
        fable_gguf(place, request.param)
    else:
        written(place, request.param)
    return place


def test_a_plan_names_the_bytes_of_the_files(model: Path) -> None:
    for spec in ("3bit", "8bit"):
        plan = plan_conversion(model, recipe_of(spec, (), "rtn"))
        with plan.store:
            assert plan.before == sum(row.before for row in plan.rows()) == pytest.approx(of_files(model), rel=1e-4)


def test_a_folder_records_them(tmp_path: Path) -> None:
    fable_gguf(tmp_path / "source.gguf", "Q8_0")
    *_, made = convert(tmp_path / "source.gguf", tmp_path / "out", ConvertOptions(recipe_of("3bit", (), "rtn"), "3bit"))
    assert isinstance(made, Converted) and made.before == of_files(tmp_path / "source.gguf")
    assert made.before == sum(row.size.before for row in made.classes) == made.to_json()["bytes_before"]
    assert json.loads((tmp_path / "out" / "effllm.json").read_text())["source"]["nbytes"] == made.before
