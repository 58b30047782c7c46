"""Which models see: a family has a module with a function for it, and all others say why not."""

import json
from importlib import import_module

import pytest

from effllm import UsageError
from effllm.runtime import images
from effllm.runtime.families import COMPOSITE
from effllm.runtime.images import SIGHTS, sight_of


def test_every_family_that_sees_is_one_whose_text_part_runs():
    assert set(SIGHTS) <= set(COMPOSITE)
    for name in SIGHTS.values():
        assert callable(import_module(f".{name}", images.__name__).sight)


@pytest.mark.parametrize("kind", sorted(set(COMPOSITE) - set(SIGHTS)))
def test_pictures_of_other_models_are_refused_in_a_line(kind, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(UsageError, match=f"pictures of {kind} models are not read") as raised:
        sight_of(tmp_path, None)
    assert "text alone works" in raised.value.hint


def test_a_model_of_text_takes_none(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert sight_of(tmp_path, None) is None
