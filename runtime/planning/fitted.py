"""What stands in a person's settings, for all models, and one of them cannot have; and what is asked of one that it must have.

An option that was typed and does not fit is an error. One of `EngineOptions.preset` gives way, with a notice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ... import EffllmError, UsageError, typed
from ...offload.checkpoint import TensorStore
from ...offload.notes import Fallback
from ..adapters.adapted import adapted
from ..config import ModelConfig, read_config
from ..source import check_mapping, open_weights
from ..sparse.bundles import SPARSE, is_lossy
from ..sparse.predictors import Predictors, load
from ..speculation import draft_model
from ..speculation.speculation_plan import demand_own_layer
from ..stores.container import Container, read_container
from ..tensors import check_tensors
from .demands import cache_form

if TYPE_CHECKING:
    from ..prepare import EngineOptions


def fitted(options: EngineOptions, folder: Path | None, config: ModelConfig, store: TensorStore, notices: list[str],
           container: Container | None = None) -> EngineOptions:
    """The options without those of `preset` that this model cannot have, each with a notice."""
    # option -> (what it is without, the check that it does not pass)
    checks: dict[str, tuple[object, Callable[[EngineOptions], object]]] = {
        "ctx": (None, lambda asked: check_context(asked, config)),
        "load": ("ram", lambda asked: asked.load == "mmap" and check_mapping(folder)),
        "predict_neurons": (False, lambda asked: predictors_of(asked, folder, config)),
        "spec": ("auto", lambda asked: asked.spec == "mtp" and demand_own_layer(config, store, container)),
        "draft": (None, lambda asked: asked.draft and folder and draft_model.refuse_other_vocabulary(folder, Path(asked.draft))),
        "lora": ((), lambda asked: adapted(asked.lora, config, check_tensors(config, store, container))),
        "kv": ("16bit", lambda asked: cache_form(asked, folder, config, store, lambda said: None))}
    for name, (without, check) in checks.items():
        if name in options.preset:
            try:
                check(options)
            except EffllmError as error:
                options = replace(options, **{name: without})
                notices.append(Fallback(f"{error.message}: left out, as it was set for all models"))
    return options


def given_way(folder: Path, options: EngineOptions) -> tuple[EngineOptions, list[str]]:
    """`fitted` for a folder that nothing else is wanted of, with its notices: from headers alone."""
    notices: list[str] = []
    store, container = open_weights(folder)
    try:
        return fitted(options, folder, read_config(folder), store, notices, container), notices
    finally:
        store.close()


def check_context(options: EngineOptions, config: ModelConfig) -> None:
    """Raises UsageError for a context that the model was not made for, unless that is forced and can be."""
    learned, most = config.position_offset is not None, config.context_length
    if options.ctx is not None and config.most_tokens is not None and options.ctx > config.most_tokens:
        raise UsageError(f"a context of {options.ctx} is more than the {config.most_tokens} tokens that this model attends to at once",
                         f"at most {most}: beyond, it attends to chosen tokens alone, which effllm does not do")
    if options.ctx is not None and options.ctx > most and (learned or not options.force):
        raise UsageError(f"a context of {options.ctx} is more than the {most} positions that the model was made for",
                         f"at most {most}: its positions are learned" if learned else f"ask for {most} at most, or --force to try")


def predictors_of(options: EngineOptions, folder: Path | None, config: ModelConfig) -> Predictors | None:
    """Those that were trained for a model, where a run is to use them. Raises UsageError where there are none."""
    if not options.predict_neurons:
        return None
    found = None if folder is None else load(folder, config.num_hidden_layers, config.hidden_size, config.intermediate_size)
    if found is None and config.hidden_act not in SPARSE and not (folder is not None and is_lossy(read_container(folder))):
        raise UsageError(f"--predict-neurons: {config.hidden_act} is zero for no neuron, there is nothing to predict", "leave it out")
    if found is None:
        raise UsageError(f"--predict-neurons: nothing in {folder} predicts this model's neurons",
                         f"effllm calibrate-sparsity {typed(folder)} --predictor 64 trains what does")
    return found
