"""The operations a family's block may call exist in every backend, with the same parameters."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.cuda.torch_ops import TorchOps
from effllm.runtime import families
from effllm.runtime.block_ops import BlockOps


def stages(described: type) -> dict[str, object]:
    return {name: function for name, function in vars(described).items() if not name.startswith("_") and inspect.isfunction(function)}


STAGES = stages(BlockOps)


@pytest.mark.parametrize("backend", [CpuOps, TorchOps])
@pytest.mark.parametrize("stage", STAGES)
def test_a_backend_takes_what_the_description_says(backend: type, stage: str) -> None:
    def told(function: object) -> list[tuple[str, bool, object]]:
        found = list(inspect.signature(function).parameters.values())[1:]  # whatever it calls itself
        return [(each.name, each.default is not each.empty, each.default) for each in found]

    assert told(getattr(backend, stage)) == told(STAGES[stage])


def test_families_ask_for_nothing_else() -> None:
    folder = Path(families.__file__).parent
    asked = {node.attr for file in folder.glob("*.py") for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
             if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ops"}
    assert asked and asked == set(STAGES), "BlockOps has what blocks of families ask for, and nothing else"
