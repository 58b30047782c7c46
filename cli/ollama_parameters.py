"""Ollama's model parameters, in its library or a Modelfile, as settings of effllm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .. import UsageError
from .settings import FileSettings, Setting, check_setting, check_value

if TYPE_CHECKING:
    from ..runtime.library.ollama import OllamaModel

# A PARAMETER -> the setting. Of the others the machine is for effllm to know (num_gpu, num_thread), or nothing here is like it.
WORDS = {"temperature": "temp", "top_k": "top-k", "top_p": "top-p", "min_p": "min-p", "typical_p": "typical",
         "repeat_penalty": "repeat-penalty", "repeat_last_n": "repeat-last-n", "presence_penalty": "presence-penalty",
         "frequency_penalty": "frequency-penalty", "seed": "seed", "stop": "stop", "num_ctx": "ctx-size", "num_predict": "predict",
         "mirostat": "mirostat", "mirostat_tau": "mirostat-ent", "mirostat_eta": "mirostat-lr"}
SHOWN = 12  # words that are left out, by their names
SEVERAL = "stop"  # which may be said several times


def value_of(name: str, said: object) -> object:
    """A JSON value, or a word of a Modelfile, as a settings value."""
    if name == SEVERAL:
        return [str(each) for each in said] if isinstance(said, list) else [str(said)]
    if isinstance(said, str):
        for kind in (int, float):
            try:
                return kind(said)
            except ValueError:
                continue
    return int(said) if isinstance(said, float) and said.is_integer() and WORDS.get(name) != "temp" else said


def as_setting(name: str, said: object, where: str) -> tuple[str, object]:
    """The setting for a PARAMETER, and its value. Raises UsageError beginning with `where` for one without a counterpart, or an invalid
    value."""
    if name not in WORDS:
        raise UsageError(f"{where}: effllm has no setting like {name}", "leave it out")
    key = WORDS[name]
    value = check_setting(key, value_of(name, said), where)
    check_value(key, value, where)
    return key, value


def settings_of(stored: OllamaModel, name: str) -> tuple[FileSettings, list[str]]:
    """The parameters that Ollama's library stores for a model, which have the lowest precedence, and those that are ignored."""
    where, kept, left = f"Ollama's parameters of {name}", {}, []
    for parameter, said in stored.params().items():
        try:
            key, value = as_setting(parameter, said, where)
            kept[key] = Setting(value, where)
        except UsageError:
            left.append(parameter)
    if system := stored.system():
        kept["system"] = Setting(system, where)
    if adapters := stored.of("adapter"):
        kept["lora"] = Setting([str(layer.path) for layer in adapters], where)
    some = sorted(left)[:SHOWN] + [f"{len(left) - SHOWN:,} others"] * (len(left) > SHOWN)
    said = [f"{name}: ignored parameters of the Ollama model: {', '.join(some)}"] if left else []
    if stored.of("messages"):
        said.append(f"{name}: initial messages of the Ollama model are ignored")
    return FileSettings(kept, {}), said


def in_toml(value: object) -> str:
    """A setting's value in TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list):
        return f"[{', '.join(map(in_toml, value))}]"
    import json

    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def table(name: str, settings: Mapping[str, object], origin: str) -> str:
    """A `[model.NAME]` table of a settings file."""
    lines = "".join(f"{key} = {in_toml(value)}\n" for key, value in settings.items())
    return f"[model.{in_toml(name)}]  # of {origin}\n{lines}"
