"""Falcon Mamba (7B): Mamba with weightless norms on the inputs of dt, B and C."""

from __future__ import annotations

from ..config import ModelConfig
from ..config_reader import Keys
from . import mamba
from .mamba import mamba1_config

LIKE = mamba
KEYS_HARMLESS = mamba.KEYS_HARMLESS | {"use_falcon_mambapy"}


def config(keys: Keys) -> ModelConfig:
    return mamba1_config(keys, keys.number("mixer_rms_eps", 1e-6))
