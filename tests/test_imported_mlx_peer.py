"""Folders that mlx-lm makes of small random models, against mlx-lm's own output."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from mlx_families import CASES, MENDED, ROUNDED, random_folder

from effllm.runtime.engine import EngineOptions, open_engine
from effllm.runtime.stores.import_config import MLX_FAMILIES

pytestmark = [pytest.mark.slow, pytest.mark.peer, pytest.mark.skipif(find_spec("mlx_lm") is None, reason="needs mlx-lm")]
IDS = [int(each) for each in np.random.default_rng(0).integers(3, 319, 24)]
# What mlx-lm makes of a folder, and the logits that it computes: with 16-bit scales, in float32.
THEIRS = """
import json, sys
from pathlib import Path
import mlx.core as mx, numpy as np
from mlx_lm import convert
from mlx_lm.utils import load_model
source, made, mode, bits, group, ids = sys.argv[1:]
convert(hf_path=source, mlx_path=made, quantize=True, dtype="bfloat16", q_mode=mode, q_bits=int(bits), q_group_size=int(group))
model, _ = load_model(Path(made))
model.set_dtype(mx.float32)
np.save(made + ".npy", np.array(model(mx.array([json.loads(ids)])).astype(mx.float32))[0])
"""


def compared(tmp_path: Path, case: str, mode: str, bits: int, group: int) -> float:
    """How far apart the logits are, by their largest."""
    random_folder(tmp_path / "source", case)
    program = MENDED.get(case, "") + THEIRS
    found = subprocess.run([sys.executable, "-c", program, str(tmp_path / "source"), str(tmp_path / "mlx"), mode, str(bits), str(group),
                            json.dumps(IDS)], capture_output=True, text=True, env=os.environ, timeout=300)
    assert found.returncode == 0, found.stderr[-2000:]
    theirs = np.load(tmp_path / "mlx.npy")
    *_, engine = open_engine(tmp_path / "mlx", EngineOptions(device="cpu", kv="32bit", ctx=64, threads=1, exact=True))
    ours = np.array(engine.forward_logits(IDS))
    engine.close()
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


@pytest.mark.parametrize("case", CASES)
def test_every_family_gives_what_mlx_gives(tmp_path: Path, case: str) -> None:
    assert compared(tmp_path, case, "affine", 4, 32) < ROUNDED.get(case, 1e-4)


@pytest.mark.parametrize(("mode", "bits", "group", "most"), [
    ("affine", 5, 64, 1e-5), ("affine", 2, 128, 1e-5), ("affine", 3, 64, 1e-5), ("affine", 6, 64, 1e-5), ("affine", 8, 64, 1e-5),
    ("mxfp4", 4, 32, 1e-5), ("mxfp8", 8, 32, 1e-5), ("nvfp4", 4, 16, 1e-5)])
def test_every_mode_gives_what_mlx_gives(tmp_path: Path, mode: str, bits: int, group: int, most: float) -> None:
    assert compared(tmp_path, "llama", mode, bits, group) < most


def test_all_that_run_were_compared() -> None:
    assert {case.split(",")[0] for case in CASES} == {*MLX_FAMILIES}
