"""The working memory planned for a device against what torch allocates: never less, and not much more."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from conversions import FABLE, options, run
from family_models import CASES, Case
from gpu_runs import opened, simulated
from saved_models import saved
from torch.utils._python_dispatch import TorchDispatchMode


class Allocations(TorchDispatchMode):
    """Bytes of storages that were made inside, and the most at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        found = function(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple | list) else (found,):
            if isinstance(each, torch.Tensor):
                self._note(each.untyped_storage())
        return found

    def _note(self, storage: torch.UntypedStorage) -> None:
        if id(storage) not in self._known:
            self._known.add(id(storage))
            self.live += storage.nbytes()
            self.most = max(self.most, self.live)
            weakref.finalize(storage, self._gone, id(storage), storage.nbytes())

    def _gone(self, which: int, nbytes: int) -> None:
        self._known.discard(which)
        self.live -= nbytes


@contextmanager
def watched() -> Iterator[Allocations]:
    with Allocations() as seen:
        yield seen


MODELS = {
    "fable": None, "fable, 4 bits": "4bit", "fable, 2 bits": "2bit",
    "gemma2": Case("gemma2"), "mixtral": Case("mixtral", dtype="bfloat16"), "opt": Case("opt"),
    **{name: CASES[name] for name in ("qwen3_5_text", "lfm2", "granitemoehybrid, state spaces")},
}


@pytest.mark.parametrize("name, kv", [*((name, "16bit") for name in MODELS), ("fable", "4bit"), ("gemma2", "32bit"), ("mixtral", "8bit")])
def test_working_memory_stays_below_the_plan(name: str, kv: str, tmp_path: Path) -> None:
    made, folder = MODELS[name], FABLE
    if isinstance(made, str):
        run(FABLE, folder := tmp_path / "small", options(made))
    elif made is not None:
        saved(made, folder := tmp_path)
    engine, _ = opened(folder, simulated(), kv=kv)
    ids = np.random.default_rng(1).integers(0, engine.config.vocab_size, 480).tolist()
    # As where drafts read the states of all tokens: the last layers take no less than others.
    engine._num_states_needed = lambda ends_prompt: None
    try:
        with watched() as seen:
            list(engine.prefill(ids))
            engine.forward_logits([1])
    finally:
        engine.close()
    planned = engine.placement.gpu.workspace_bytes
    assert planned / 5 <= seen.most <= planned, f"{seen.most / 2**20:.1f} MiB used, {planned / 2**20:.1f} MiB planned"
