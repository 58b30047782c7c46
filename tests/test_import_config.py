"""What a plan expects of another tool's quantized checkpoint before it is here, against what its files turn out to be."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_imported import CASES, written

from effllm.quant.spec import QuantSpec
from effllm.runtime import families
from effllm.runtime.config import read_config
from effllm.runtime.import_config import block_of, expected_formats
from effllm.runtime.source import open_weights


@pytest.mark.parametrize("name", CASES)
def test_a_plan_expects_what_the_files_hold(tmp_path: Path, name: str) -> None:
    """Each matrix of each layer in the same format, from its codes or widened."""
    section, _ = CASES[name]
    written(tmp_path / "m", name)
    config = read_config(tmp_path / "m")
    formats, family = expected_formats(section), families.get(config.family)
    store, container = open_weights(tmp_path / "m")
    store.close()
    found = {} if container is None else container.tensors
    seen = 0
    for layer in range(config.num_hidden_layers):
        for role, rule in family.layer_tensors(config, layer).items():
            expected = formats(role, rule)
            if len(rule.shape) != 2:
                assert expected is None
                continue
            seen += 1
            assert expected == (found[rule.name].spec if rule.name in found else QuantSpec.raw("f16")), rule.name
    assert seen == 42


def test_blocks_are_those_that_all_groups_state() -> None:
    def section(*weights: dict) -> dict:
        return {"quant_method": "compressed-tensors", "config_groups": {f"g{i}": {"weights": each} for i, each in enumerate(weights)}}

    assert block_of(section({"group_size": 128})) == (0, 128) and block_of(section({"block_structure": [64, 128]})) == (64, 128)
    assert block_of(section({"group_size": 128}, {"group_size": 64})) == block_of(section({"group_size": -1})) == (0, 0)
    assert block_of(section({"block_structure": [128]})) == block_of(section({"group_size": "128"})) == block_of({}) == (0, 0)
    assert block_of({"quant_method": "fp8", "weight_block_size": [128, 128]}) == (128, 128)
