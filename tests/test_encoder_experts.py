"""Encoders with experts: vectors against a plain float64 computation."""

from pathlib import Path

import numpy as np
from encoder_models import unit
from nomic_moe_models import nomic_moe, nomic_states
from test_encoders import never, opened, returned, rows_of

from effllm.runtime.encoders.encoder_config import read_encoder_config


def test_nomic_with_experts(tmp_path: Path) -> None:
    folder, tensors = nomic_moe(tmp_path / "m")
    encoder = opened(folder, threads=2)
    assert not read_encoder_config(folder, strict=True).warnings
    for rows in (rows_of(), rows_of((5, 20))):  # several pieces of many tokens, and few that all threads share
        for row, own in zip(rows, returned(encoder.vectors(rows, never)), strict=True):
            np.testing.assert_allclose(unit(own), unit(nomic_states(tensors, row).mean(0)), atol=2e-6, rtol=0)
