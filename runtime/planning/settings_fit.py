"""Reconciling the user's global settings with one model: settings that it does not support, and options that it requires.

An explicitly given option that does not fit is an error. One that comes from the settings file (`EngineOptions.from_settings`) is dropped,
with a notice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ... import EffllmError, UsageError, typed
from ...offload.checkpoint import TensorStore
from ...offload.notes import Fallback
from ...quant.kv import codec
from ..adapters.loaded_adapters import load_adapters
from ..config import ModelConfig, read_config
from ..indexer_config import without_index
from ..kv.kv_setting import AUTO, UNPACKED
from ..source import check_mapping, open_weights
from ..sparse.activation_predictors import Predictors, load
from ..sparse.neuron_bundles import SPARSE, is_lossy
from ..speculation import draft_model
from ..speculation.speculation_plan import require_mtp
from ..stores.container import Container, read_container
from ..tensors import check_tensors
from .devices import DRIVER
from .plan_request import cache_layout

if TYPE_CHECKING:
    from ..prepare import EngineOptions


def drop_unsupported(options: EngineOptions, folder: Path | None, config: ModelConfig, store: TensorStore, notices: list[str],
           container: Container | None = None, model_settings: Collection[str] = ()) -> EngineOptions:
    """The options without those from the settings file that this model does not support, each with a notice.

    `model_settings`: names of settings for this model alone; one that it does not support raises an error with its name."""
    # option -> (its neutral value, the check that it fails)
    checks: dict[str, tuple[object, Callable[[EngineOptions], object]]] = {
        "ctx": (None, lambda requested: check_context(requested, config)),
        "load": ("ram", lambda requested: requested.load == "mmap" and check_mapping(folder)),
        "predict_neurons": (False, lambda requested: predictors_of(requested, folder, config)),
        "spec": ("auto", lambda requested: requested.spec == "mtp" and require_mtp(config, store, container)),
        "draft": (None, lambda requested: requested.draft and folder
                  and draft_model.refuse_other(folder, Path(requested.draft), config, requested)),
        "lora": ((), lambda requested: load_adapters(requested.lora, config, check_tensors(config, store, container))),
        "kv": ("16bit", lambda requested: cache_layout(requested, folder, config, store, lambda message: None))}
    for name, (neutral, check) in checks.items():
        if name in options.from_settings or name in model_settings:
            try:
                check(options)
            except EffllmError as error:
                if name in model_settings:
                    error.option = name
                    raise
                options = replace(options, **{name: neutral})
                notices.append(Fallback(f"{error.message}: ignored, since it is a setting for all models"))
    return options


def dropped_settings(folder: Path, options: EngineOptions, model_settings: Collection[str] = ()) -> tuple[EngineOptions, list[str]]:
    """`drop_unsupported` with its notices, for a folder that is not opened otherwise; reads only headers."""
    notices: list[str] = []
    store, container = open_weights(folder)
    try:
        return drop_unsupported(options, folder, read_config(folder), store, notices, container, model_settings), notices
    finally:
        store.close()


def check_context(options: EngineOptions, config: ModelConfig) -> None:
    """Raises UsageError for a context beyond what the model was trained for, unless it is forced and possible."""
    has_learned_positions, max_ctx = config.position_offset is not None, config.context_length
    if options.ctx is not None and config.max_supported_tokens is not None and options.ctx > config.max_supported_tokens:
        raise UsageError(f"a context of {options.ctx} is more than the {config.max_supported_tokens} tokens that this model attends to at "
                         "once",
                         f"at most {max_ctx}: beyond that it attends to a part of the text, which is not supported", "ctx")
    if options.ctx is not None and options.ctx > max_ctx and (has_learned_positions or not options.force):
        raise UsageError(f"a context of {options.ctx} is more than the {max_ctx} positions that the model was trained for",
                         f"at most {max_ctx}: its positions are learned" if has_learned_positions
                         else f"ask for {max_ctx} at most, or --force to try", "ctx")


def predictors_of(options: EngineOptions, folder: Path | None, config: ModelConfig) -> Predictors | None:
    """A model's activation predictors, if a run is to use them. Raises UsageError without any."""
    if not options.predict_neurons:
        return None
    predictors = None if folder is None else load(folder, config.num_hidden_layers, config.hidden_size, config.intermediate_size)
    if predictors is None and config.hidden_act not in SPARSE and not (folder is not None and is_lossy(read_container(folder))):
        raise UsageError(f"--predict-neurons: {config.hidden_act} is never exactly zero: there is nothing to predict", "leave it out")
    if predictors is None:
        raise UsageError(f"--predict-neurons: nothing in {folder} predicts this model's neurons",
                         f"effllm calibrate-sparsity {typed(folder)} --predictor 64 trains some")
    return predictors


def resolve_sparse_attention(config: ModelConfig, options: EngineOptions, notices: list[str]) -> tuple[ModelConfig, EngineOptions]:
    """The model config and the options, reconciled. In a context where sparse attention would select everything, the model runs without its
    indexers. Raises UsageError for an option that sparse attention rules out; if it comes from the settings file, it is dropped with a
    notice."""
    on_cpu = {"device": ("cpu", "--device cuda", options.device == "cuda"),
              "gpu_layers": (None, f"-ngl {options.gpu_layers}", bool(options.gpu_layers)), "vram": (None, "--vram", bool(options.vram))}
    if config.family == "whisper":
        reason = "this model's cross-attention to audio runs on the CPU only"
        options = _drop_options(options, on_cpu, reason, "", notices)
        if options.device != "cpu" and options.gpu_layers != 0 and DRIVER.exists():
            notices.append(Fallback(f"the GPU is not used: {reason}"))
        return config, replace(options, device="cpu")
    if config.compressed_attention is not None:
        cause, reason, alternative = "keys are compressed over several tokens", "this model attends to compressed keys", ""
    elif config.indexer is None:
        return config, options
    else:
        dense_tokens = config.indexer.shape.dense_tokens
        if options.ctx is not None and options.ctx <= dense_tokens:
            config = without_index(config)
            if config.interleaves_shared_kv:
                ruled_out = {"kv_ram": (None, "--kv-ram", options.kv_ram is not None)}
                cause = "layers of this model share keys and values, and these stay in memory"
                options = _drop_options(options, ruled_out, cause, "", notices)
            return config, options
        cause, reason = f"attention is sparse beyond {dense_tokens}", f"beyond {dense_tokens} tokens this model uses sparse attention"
    is_packed = options.kv != AUTO and codec(options.kv).is_packed
    ruled_out = {"kv": (UNPACKED, f"--kv {options.kv}", is_packed), "kv_ram": (None, "--kv-ram", options.kv_ram is not None),
             "kv_read": ("exact", "--kv-read sparse", options.kv_read == "sparse")}
    reason, is_token_sparse = f"{reason}, with an unpacked cache in memory", config.compressed_attention is None
    if is_token_sparse:
        ruled_out |= on_cpu
        reason, alternative = f"{reason}, on the CPU", f"; or -c {dense_tokens}, where attention is full"
    options = _drop_options(options, ruled_out, reason, alternative, notices)
    if options.kv == AUTO:
        notices.append(f"--kv auto: {cause}, so keys and values stay at {UNPACKED}")
        options = replace(options, kv=UNPACKED)
    if is_token_sparse and options.device != "cpu" and options.gpu_layers != 0 and DRIVER.exists():
        notices.append(Fallback(f"the GPU is not used: {cause}, on the CPU alone (-c {dense_tokens} uses it)"))
    return config, replace(options, device="cpu") if is_token_sparse else options


RuledOut = Mapping[str, tuple[object, str, bool]]  # by option: its neutral value, its flag, whether it is set


def _drop_options(options: EngineOptions, ruled_out: RuledOut, reason: str, alternative: str, notices: list[str]) -> EngineOptions:
    """The options without those of `ruled_out` that come from the settings file. Raises UsageError for one set on the command line."""
    for name, (neutral, flag, is_set) in ruled_out.items():
        if not is_set:
            continue
        message = f"{flag}: {reason}"
        if name not in options.from_settings:
            raise UsageError(message, f"leave {flag} out{alternative}")
        options = replace(options, **{name: neutral})
        notices.append(Fallback(f"{message}; ignored, since it is a setting for all models"))
    return options
