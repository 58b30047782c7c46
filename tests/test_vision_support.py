"""Which families support image input: each has a module with a function for it, and all others state why not."""

import json
from importlib import import_module

import pytest

from effllm import UsageError
from effllm.runtime import audio, images
from effllm.runtime.audio import AUDIO_ENCODERS, OPTIONAL_AUDIO
from effllm.runtime.families import COMPOSITE, FAMILIES
from effllm.runtime.images import VISION_ENCODERS, encoders_of


def test_every_family_that_sees_is_one_whose_text_part_runs():
    assert set(VISION_ENCODERS) | set(AUDIO_ENCODERS) <= {*COMPOSITE, *FAMILIES}
    assert set(OPTIONAL_AUDIO) <= set(VISION_ENCODERS) & set(AUDIO_ENCODERS)
    for package, names in ((images, VISION_ENCODERS), (audio, AUDIO_ENCODERS)):
        for name in names.values():
            assert callable(import_module(f".{name}", package.__name__).encoder)


@pytest.mark.parametrize("kind", sorted(set(COMPOSITE) - set(VISION_ENCODERS) - set(AUDIO_ENCODERS)))
def test_images_of_other_models_are_refused_in_one_line(kind, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(UsageError, match=f"images are not supported for {kind} models") as raised:
        encoders_of(tmp_path, None)
    assert "text-only works" in raised.value.hint


def test_a_model_of_text_takes_none(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert encoders_of(tmp_path, None) == {}
