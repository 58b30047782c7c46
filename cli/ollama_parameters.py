"""Ollama's model parameters, in its library or a Modelfile, as settings of effllm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .. import UsageError
from .settings import FileSettings, Setting, check_setting, check_value

if TYPE_CHECKING:
    from ..runtime.library.ollama import OllamaModel

# PARAMETER -> setting. Others describe the machine (num_gpu, num_thread) or have no counterpart.
SETTING_NAMES = {"temperature": "temp", "top_k": "top-k", "top_p": "top-p", "min_p": "min-p", "typical_p": "typical",
         "repeat_penalty": "repeat-penalty", "repeat_last_n": "repeat-last-n", "presence_penalty": "presence-penalty",
         "frequency_penalty": "frequency-penalty", "seed": "seed", "stop": "stop", "num_ctx": "ctx-size", "num_predict": "predict",
         "mirostat": "mirostat", "mirostat_tau": "mirostat-ent", "mirostat_eta": "mirostat-lr"}
MAX_NAMED = 12  # ignored parameters that a note names
REPEATABLE = "stop"  # may be given several times


def value_of(name: str, value: object) -> object:
    """The value of a setting for a JSON value, or for a word of a Modelfile."""
    if name == REPEATABLE:
        return [str(item) for item in value] if isinstance(value, list) else [str(value)]
    if isinstance(value, str):
        for kind in (int, float):
            try:
                return kind(value)
            except ValueError:
                continue
    return int(value) if isinstance(value, float) and value.is_integer() and SETTING_NAMES.get(name) != "temp" else value


def as_setting(name: str, raw_value: object, where: str) -> tuple[str, object]:
    """The setting for a PARAMETER, and its value. Raises UsageError beginning with `where` for one without a counterpart, or an invalid
    value."""
    if name not in SETTING_NAMES:
        raise UsageError(f"{where}: effllm has no setting like {name}", "leave it out")
    key = SETTING_NAMES[name]
    value = check_setting(key, value_of(name, raw_value), where)
    check_value(key, value, where)
    return key, value


def settings_of(stored: OllamaModel, name: str) -> tuple[FileSettings, list[str]]:
    """The parameters that Ollama's library stores for a model, which have the lowest precedence, and those that are ignored."""
    origin, settings, ignored = f"Ollama's parameters of {name}", {}, []
    for parameter, raw_value in stored.params().items():
        try:
            key, value = as_setting(parameter, raw_value, origin)
            settings[key] = Setting(value, origin)
        except UsageError:
            ignored.append(parameter)
    if system := stored.system():
        settings["system"] = Setting(system, origin)
    if adapters := stored.of("adapter"):
        settings["lora"] = Setting([str(layer.path) for layer in adapters], origin)
    named = sorted(ignored)[:MAX_NAMED] + [f"{len(ignored) - MAX_NAMED:,} others"] * (len(ignored) > MAX_NAMED)
    notes = [f"{name}: ignored parameters of the Ollama model: {', '.join(named)}"] if ignored else []
    if stored.of("messages"):
        notes.append(f"{name}: initial messages of the Ollama model are ignored")
    return FileSettings(settings, {}), notes


def to_toml(value: object) -> str:
    """A setting's value in TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list):
        return f"[{', '.join(map(to_toml, value))}]"
    import json

    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_table(name: str, settings: Mapping[str, object], origin: str) -> str:
    """A `[model.NAME]` table of a settings file."""
    lines = "".join(f"{key} = {to_toml(value)}\n" for key, value in settings.items())
    return f"[model.{to_toml(name)}]  # of {origin}\n{lines}"
