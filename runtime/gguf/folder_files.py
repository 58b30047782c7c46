"""Small files of a model folder derived from GGUF metadata: sampling settings, licence, config and tokenizer files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from ...offload.gguf_header import GgufHeader, Value
from ...offload.safetensors_header import is_gguf
from .config import config_json
from .split_files import close_all
from .store import open_file, read_header
from .tokenizer import END_ROLES, tokenizer_files

SAMPLING_PREFIX, LICENSE_KEY = "general.sampling.", "general.license"
LICENCE_NAME = re.compile(r"[A-Za-z0-9.+_-]{1,40}")
MAX_INT32, MAX_FLOAT32 = 2**31 - 1, 3e38
# Sampling key of the file -> key of generation_config.json.
SETTINGS = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
            "penalty_last_n": "penalty_last_n", "xtc_probability": "xtc_probability", "xtc_threshold": "xtc_threshold",
            "mirostat": "mirostat", "mirostat_tau": "mirostat_tau", "mirostat_eta": "mirostat_eta"}
INTEGER_SETTINGS = {"top_k": 0, "penalty_last_n": -1, "mirostat": 0}  # integer settings -> minimum


def generation_config(path: Path) -> dict[str, object]:
    """The recommended sampling settings; values that are not numbers are left out."""
    return _sampling(read_header(path))


def _sampling(header: GgufHeader) -> dict[str, object]:
    stated = {setting: header.metadata.get(SAMPLING_PREFIX + gguf_key) for gguf_key, setting in SETTINGS.items()}
    return {name: value for name, value in stated.items() if isinstance(value, int | float) and not isinstance(value, bool)}


def sampling_metadata(settings: Mapping[str, object]) -> dict[str, Value]:
    """Metadata keys for the settings of a generation_config.json, as far as GGUF has names for them; `settings` are validated ones."""
    values = {gguf_key: settings[setting] for gguf_key, setting in SETTINGS.items() if setting in settings}
    if settings.get("do_sample") is False:
        values["temp"] = 0.0
    return {SAMPLING_PREFIX + name: min(max(INTEGER_SETTINGS[name], value), MAX_INT32) if name in INTEGER_SETTINGS else float(value)
            for name, value in values.items() if value < MAX_FLOAT32}


def stated_licence(header: GgufHeader) -> str | None:
    """The licence name that a file states, `general.license.name` first; None if there is none."""
    candidates = (header.metadata.get(key) for key in (f"{LICENSE_KEY}.name", LICENSE_KEY))
    return next((value for value in candidates if isinstance(value, str) and LICENCE_NAME.fullmatch(value)), None)


def licence_metadata(source: Path, licence: str | None) -> dict[str, Value]:
    """Licence keys: those of a GGUF `source`, else `licence`; empty if that is None."""
    source_metadata = read_header(source).metadata if is_gguf(source) else {}
    source_keys = {key: value for key, value in source_metadata.items() if key.startswith(LICENSE_KEY)}
    return source_keys or ({LICENSE_KEY: licence} if licence else {})


def folder_texts(path: Path) -> dict[str, str]:
    """Name -> text of config.json, generation_config.json, tokenizer.json and tokenizer_config.json."""
    with_factors = open_file(path)
    header = with_factors.header
    close_all(with_factors.opened)
    config = config_json(header, with_factors.rope_factors)
    ends = [header.metadata[key] for name in END_ROLES if type(header.metadata.get(key := f"tokenizer.ggml.{name}_token_id")) is int]
    config["eos_token_id"] = ends or None
    generation = {"eos_token_id": ends or None, "bos_token_id": config["bos_token_id"], **_sampling(header)}
    return {"config.json": json.dumps(config, indent=1) + "\n", "generation_config.json": json.dumps(generation, indent=1) + "\n",
            **tokenizer_files(path)}
