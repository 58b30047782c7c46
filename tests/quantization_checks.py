"""Checks for quantized models: calibration equals a forward pass, certain matrices stay unquantized, and outputs stay close."""

from pathlib import Path

import numpy as np
from conversions import options, run
from hybrid_models import IDS, opened

from effllm.kernels.cpu.candidates import default_registry
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.threads import ThreadPool
from effllm.runtime.calibrate import Calibration, LayerStats
from effllm.runtime.config import read_config
from effllm.runtime.conversion.convert_plan import plan_conversion
from effllm.runtime.model import Model
from effllm.runtime.planning.plan_request import LOGIT_ROWS
from effllm.runtime.source import open_store
from effllm.runtime.stores.container import read_container
from effllm.runtime.workspace_dims import dims


def assert_calibration_is_a_pass(folder: Path, width: int = 96, unseen: set[str] | None = None) -> list[LayerStats]:
    """Layer by layer and window by window: what leaves the last layer is what a forward pass gives, and statistics are as wide as what a
    matrix reads; all matrices but those in the roles `unseen` have some. Returns what each layer was told."""
    config, cut = read_config(folder), [np.arange(i, i + width) * 7 % 300 for i in range(2)]
    ops = CpuOps(ThreadPool(1), dims(config, width, width, LOGIT_ROWS), default_registry(exact=True))
    with open_store(folder) as store:
        calibration = Calibration(Model(config, store, ["cpu"] * config.num_hidden_layers, {"cpu": ops}, width), ops, cut)
        stats = [item for item in calibration.run() if isinstance(item, LayerStats)]
        left = calibration.model.read_left(calibration.states)
    engine = opened(folder, kv="32bit", ctx=384, exact=True)
    for i, window in enumerate(cut):
        engine.cache.truncate(0)
        engine.reset()
        ours = engine.model.forward(window, engine.cache)
        assert left.shape[1:] == ours.shape[1:] and np.abs(left[width * i : width * (i + 1)] - ours).max() < 1e-4 * np.abs(ours).max()
    for found in stats:
        widths = {role: tensor.shape[1] for role, tensor in engine.model.tensors[found.key].items() if tensor.is_matrix}
        assert all(found.roles[role].hessian.shape[0] == widths[role] for role in widths.keys() & found.roles.keys())
        assert unseen is None or found.key == "outer" or widths.keys() - found.roles.keys() <= unseen
    engine.close()
    return stats


def converted(folder: Path, made: Path, bits: str) -> set[str]:
    """Convert a folder to `made`; returns the roles of matrices that stay unquantized."""
    run(folder, made, options(bits))
    container, plan = read_container(made), plan_conversion(folder, options(bits).recipe)
    plan.store.close()
    return {job.role for job in plan.jobs if container.tensors[job.name].spec.is_raw and len(job.shape) == 2}


def assert_answers_stay_near(folder: Path, made: Path, share: float) -> None:
    """Logits of a text differ by less than that share of their spread."""
    rows = []
    for each in (made, folder):
        engine = opened(each)
        rows.append(np.concatenate([logits.copy() for _, logits in engine.score(IDS[:150])]))
        engine.close()
    assert np.abs(rows[0] - rows[1]).mean() < share * np.abs(rows[1] - rows[1].mean()).mean()
