"""A small config and what a refusal of one must look like, for the tests of config.json."""

import pytest

from effllm import EffllmError
from effllm.runtime.config import parse_config

SMALL = {"vocab_size": 300, "hidden_size": 96, "intermediate_size": 88, "num_hidden_layers": 4, "num_attention_heads": 6,
         "num_key_value_heads": 2}
LLAMA = {"model_type": "llama", **SMALL}


def refused(raw: dict[str, object], *words: str, strict: bool = False) -> EffllmError:
    """The config is refused in one line that holds `words`."""
    with pytest.raises(EffllmError) as caught:
        parse_config(raw, strict)
    for word in words:
        assert word in caught.value.message, caught.value.message
    assert "\n" not in caught.value.message and "\n" not in caught.value.hint and len(caught.value.message) < 400
    return caught.value
