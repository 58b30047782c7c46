"""The models that a router can load, by the names that requests use: all on this machine, or those that it was given.

They are listed from headers and resolved as `effllm run` resolves them, among local ones only: no request downloads anything, and none
makes the server read a folder that is not one of the models."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ... import EffllmError
from ...runtime import hub
from ...runtime.catalog import ModelRef, resolve
from ...runtime.library import storage
from ...runtime.library.listing import local_models, model_names
from ...runtime.library.local_model import LocalModel, local_model
from ...runtime.library.model_name import parse_reference
from .problems import Problem, message_of

PATH_PREFIXES = (".", "/", "~")  # beginnings of a path that cannot be a name
STALE_S = 60.0  # after which headers are read again, even if the names are the same


@dataclass(frozen=True)
class RegisteredModel:
    """A model that can be loaded. `name`: as in API responses; `typed`: as on a command line; `folder` and `variant` (a format to quantize
    to on load) identify it, whatever it is called. `facts`: from its headers, where they were read."""

    name: str
    typed: str
    folder: Path
    variant: str | None = None
    facts: LocalModel | None = None

    @property
    def key(self) -> tuple[str, str | None]:
        return os.path.abspath(self.folder), self.variant


class ModelRegistry:
    """`only`: the models that it was given; None for all on this machine. Methods read the disk, for tens of milliseconds: do not call them
    on the event loop."""

    def __init__(self, variables: Mapping[str, str], only: Iterable[ModelRef] | None = None) -> None:
        self._variables = variables
        self._only = None if only is None else [*only]
        self._lock = threading.Lock()
        self._listed: list[RegisteredModel] = []
        self._names: list[str] = []
        self._read = 0.0

    def models(self) -> list[RegisteredModel]:
        """All models, in the order of `effllm list`."""
        with self._lock:
            names = model_names(self._variables)
            if not self._listed or names != self._names or time.monotonic() - self._read > STALE_S:
                self._listed, self._names, self._read = self._scan(), names, time.monotonic()
            return self._listed

    def find(self, name: str) -> RegisteredModel:
        """The model of that name. Raises Problem."""
        models = self.models()
        for each in models:
            if name in (each.name, each.typed):
                return each
        unknown = f"there is no model {name!r:.100}"
        try:
            is_path = parse_reference(name, self._variables).path is not None
            ref = resolve(name, self._variables)
        except EffllmError as error:
            ollama_name = f"ollama:{name.removesuffix(':latest')}".lower()  # programs that were made for Ollama say its names
            if (ollama_model := next((each for each in models if each.typed.lower() == ollama_name), None)) is not None:
                return ollama_model
            raise self._missing(name, unknown if name.startswith(PATH_PREFIXES) else message_of(error)) from error
        model = RegisteredModel(" ".join(name.split()), name, ref.folder, ref.variant)
        registered = next((each for each in models if each.key == model.key), None)
        if registered is None and (self._only is not None or is_path or not self._is_named(ref)):
            raise self._missing(name, unknown)
        return registered or model

    def _scan(self) -> list[RegisteredModel]:
        local = local_models(self._variables)
        if self._only is None:
            return named_models([(each.name, each.folder, None, each) for each in local])
        facts = {os.path.abspath(each.folder): each for each in local}
        return named_models([(ref.text, ref.folder, ref.variant, facts.get(os.path.abspath(ref.folder)) or local_model(ref.text,
                                                                                                                       ref.folder))
                             for ref in self._only])

    def _is_named(self, ref: ModelRef) -> bool:
        """Whether a name of the catalog or of a repository leads there, rather than a path that a request spells out."""
        folders = (hub.cache_folder(self._variables), storage.models_folder(self._variables))
        return ref.alias is not None or any(Path(os.path.abspath(ref.folder)).is_relative_to(os.path.abspath(each)) for each in folders)

    def _missing(self, name: str, reason: str) -> Problem:
        examples = ", ".join(each.name for each in self.models()[:5])
        return Problem(404, f"{reason} (/v1/models lists the models: {examples})" if self._only is None else
                       f"there is no model {name!r:.100}: this server has {examples}", param="model", code="model_not_found")


def named_models(models: Iterable[tuple[str, Path, str | None, LocalModel | None]]) -> list[RegisteredModel]:
    """Models by (as typed, folder, variant, facts). One that was typed as a path is named by the shortest end of that path that is unique,
    since no response names a folder of this machine. Duplicates are dropped."""
    by_name: dict[str, RegisteredModel] = {}
    for typed, folder, variant, facts in {item[:3]: item for item in models}.values():
        path = Path(typed).expanduser()
        candidates = [typed]
        if typed.startswith(PATH_PREFIXES) or path.exists():
            parts = Path(os.path.abspath(path)).parts[1:]  # a link's own name, not its target's
            candidates = ["/".join(parts[-count:]) for count in range(1, len(parts) + 1)]
        name = next((item for item in candidates if item not in by_name), typed)
        by_name.setdefault(name, RegisteredModel(" ".join(name.split()), typed, folder, variant, facts))
    return [*by_name.values()]
