"""llama.cpp running a GGUF file on the CPU, driven token by token through its C API: the other side of a benchmark."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import llama_cpp
import numpy as np

FLASH = {"auto": llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO, "off": llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED,
         "on": llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED}

CACHE = {name: getattr(llama_cpp, f"GGML_TYPE_{name.upper()}") for name in ("f32", "f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")}


@llama_cpp.llama_log_callback
def _errors_only(level: int, text: bytes, user_data: int) -> None:
    if level == 4:  # GGML_LOG_LEVEL_ERROR
        print(text.decode(errors="replace"), end="", flush=True)


def quiet() -> None:
    """Only errors from llama.cpp, for the whole process."""
    llama_cpp.llama_log_set(_errors_only, ctypes.c_void_p(0))


class Peer:
    """One file and one sequence. `flash`: auto (llama.cpp's default), on or off; `keys` and `values`: types of the cache. `mapped`:
    weights are used where they lie in the mapped file. By default they may be copied into another order, which a process that may not
    hold them all does not survive."""

    def __init__(self, path: Path, ctx: int, threads: int, batch: int = 512, flash: str = "auto", keys: str = "f16",
                 values: str = "f16", mapped: bool = False) -> None:
        quiet()
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0
        if mapped:
            model_params.load_mode, model_params.use_extra_bufts = llama_cpp.LLAMA_LOAD_MODE_MMAP, False
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
        if not self.model:
            raise RuntimeError(f"llama.cpp does not load {path}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = ctx, batch, batch
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = FLASH[flash]
        params.type_k, params.type_v = CACHE[keys], CACHE[values]
        params.no_perf = True
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp makes no context of {ctx} for {path}")
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(batch, 0, 1)
        self.most, self.held = batch, 0

    def clear(self) -> None:
        """Forget the sequence."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), False)
        self.held = 0

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self.context), 0, length, -1)
        self.held = length

    def forward(self, ids: Sequence[int], logits: str = "all") -> np.ndarray:
        """Run `ids` after the held tokens, in batches; logits float32 [n, V] of all of them or of the last: a view of the last batch for
        "last", a copy for "all" if there is more than one batch. Raises RuntimeError when llama.cpp refuses."""
        parts = []
        for start in range(0, len(ids), self.most):
            part = ids[start : start + self.most]
            final = start + len(part) == len(ids)
            self.batch.n_tokens = len(part)
            for i, token in enumerate(part):
                self.batch.token[i], self.batch.pos[i] = int(token), self.held + i
                self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, 0
                self.batch.logits[i] = logits == "all" or (final and i == len(part) - 1)
            if code := llama_cpp.llama_decode(self.context, self.batch):
                raise RuntimeError(f"llama_decode: {code}")
            self.held += len(part)
            rows = len(part) if logits == "all" else int(final)
            if rows:
                view = np.ctypeslib.as_array(llama_cpp.llama_get_logits(self.context), (rows, self.vocab_size))
                parts.append(view.copy() if logits == "all" and len(ids) > self.most else view)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def close(self) -> None:
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)
