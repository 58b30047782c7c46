"""A KV cache as files, and back: all the state that the next token depends on.

Sealed pages are written as they are in memory, one file for all layers of a page; exact tokens (the sinks and the newest) are compressed
losslessly. A page's key is a hash chain over what its bytes depend on (model, weights, codec, grid) and every token up to its end, so
sessions with a common prefix share their first pages. A restored cache is bit-identical, including which tokens are exact.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache as remembered
from pathlib import Path

import numpy as np

from ... import ContextOverflow, EffllmError, UsageError
from ...kernels.compile import cache_key
from ...kernels.layout import F32, PAGE
from ...offload.page_file import KEY_NBYTES, VERSION, DamagedPage, PageFile
from ...offload.page_stream import PagesLost
from ...quant.kv_lossless import most_exact, pack_exact, unpack_exact
from ...quant.kv_page_check import check_stored
from ..cache import KVCache
from ..config import read_config
from ..engine import Engine
from ..events import Progress
from ..images.media import FIRST_MEDIA_ID, text_ids
from ..kv.kv_profile_file import identity_of
from .config_identity import config_digest
from .session_format import SavedCache, SavedSession, TokenizedText
from .session_name import rm_command
from .session_store import SessionStore

ADAPTERS, SPARSE_ATTENTION = "adapters", "chosen"  # parts of the identity that exist only with adapters, or with sparse attention
# Part of the identity -> the message if it differs; {0} is the saved value, {1} this run's.
DIFFERENCES = {
    "model": ("another model", "run it with {model}"),
    "weights": ("other weights, perhaps of other bits", "run it with {model} as it was then"),
    "kv": ("--kv {0}, this run has {1}", "--kv {0}"),
    "basis": ("another KV profile, or by another effllm", "the kv_profile.json and the effllm of then"),
    "sink": ("--kv-sink {0}, this run has {1}", "--kv-sink {0}"),
    "window": ("--kv-window {0}, this run has {1}", "--kv-window {0}"),
    "positions": ("a context of another length, to which this model stretches its positions", "the -c of then"),
    "exact": ("--exact {0}, this run has {1}", "the same flag"),
    "pages": ("pages of version {0}, this effllm has {1}", "the effllm that wrote it"),
    ADAPTERS: ("another --lora, or none", "the --lora of then, or none"),
    SPARSE_ATTENTION: ("a context in which tokens see {0}, this run has one in which they see {1}", "the -c of then"),
}


def folder_identity(folder: Path, strict: bool = False) -> dict[str, object]:
    """The part of `identity` that a model's folder tells before its weights are read."""
    return {"model": config_digest(read_config(folder, strict)), "weights": identity_of(folder)}


def identity(engine: Engine) -> dict[str, object]:
    """Everything besides tokens that a page's bytes depend on, in JSON types. Raises EffllmError for a model without a folder."""
    prepared, shape = engine.prepared, engine.cache.shape
    if prepared.folder is None:
        raise EffllmError("a synthetic model has no sessions", "use a model in a folder")
    basis = hashlib.sha256()
    for codec in engine.cache.codecs:
        if codec.is_packed:
            sides = (codec.basis.k_scale, codec.basis.k_matrix, codec.basis.v_matrix, codec.basis.k_mean, codec.basis.strength_k,
                     codec.basis.strength_v)
            basis.update(f"{codec.bits!r} {codec.basis.profile}".encode())
            basis.update(b"".join(b"-" if side is None else np.ascontiguousarray(side, "<f4").tobytes() for side in sides))
    positions = hashlib.sha256()
    for table in engine.model.ropes:
        positions.update(b"-" if table is None else table.inv_freq.astype("<f4").tobytes())
        positions.update(b"" if table is None else f"{table.attention_scaling} {table.rotary_dim}".encode())
        positions.update(b"neighbours" if table is not None and table.interleaved else b"")
        positions.update(b"" if table is None or table.queries is None else f"{table.queries.growth}".encode())
    packed = engine.cache.is_packed
    return {**folder_identity(prepared.folder), "kv": engine.options.kv, "basis": basis.hexdigest()[:32], "sink": shape.sinks,
            "window": engine.prepared.window if packed else 0, "positions": positions.hexdigest()[:32], "exact": engine.options.exact,
            "pages": VERSION, **({ADAPTERS: engine.adapted_by} if engine.adapted_by else {}),
            **({SPARSE_ATTENTION: "chosen ones"} if engine.cache.indexes else {})}


def kernel_identity(engine: Engine) -> str:
    """What the bits of a prompt's keys and values depend on beyond `identity`: kernels, instruction set, devices, the chunk grid and which
    chunks copy layers to another device."""
    gpu = f" {engine.backends['cuda'].on.kind}" if "cuda" in engine.backends else ""
    return _kernel_hash(" ".join(engine.placement.devices) + gpu, engine.prepared.chunk, engine.model.copied_from)


@remembered
def _kernel_hash(devices: str, chunk: int, copied_from: int | None) -> str:
    copies = "" if copied_from is None else f" {copied_from}"
    return hashlib.sha256(f"{cache_key()} {np.__version__} {sys.platform} {devices} {chunk}{copies}".encode()).hexdigest()[:32]


def refuse_other(session: SavedSession, own: Mapping[str, object]) -> None:
    """Raises UsageError if a session's cache was made by another model or other settings. `own`: this run's `identity`, or a part of it."""
    if session.cache is None:
        return
    theirs = session.cache.identity
    for part, (what, hint) in DIFFERENCES.items():
        is_compared = part in own or part in (ADAPTERS, SPARSE_ATTENTION) and "pages" in own  # which every full identity has
        if is_compared and theirs.get(part) != own.get(part):
            values = ["all" if each is None else ("off", "on")[each] if isinstance(each, bool) else each
                      for each in (theirs.get(part), own.get(part))]
            raise UsageError(f"session {session.name} was saved with {what.format(*values)}",
                             f"{hint.format(*values, model=session.model)}; another --session NAME; or "
                             f"{rm_command(session.name, more='--cache')}, which keeps the text and reads it again")


def page_keys(own: Mapping[str, object], tokens: Sequence[int], sinks: int, pages: int) -> list[str]:
    """The keys of the sinks and of the first `pages` pages of these tokens."""
    link = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).digest()
    keys, begin = [], 0
    for end in (sinks, *(sinks + PAGE * (page + 1) for page in range(pages))):
        link = hashlib.sha256(link + token_bytes(tokens[begin:end])).digest()
        keys.append(link[:KEY_NBYTES].hex())
        begin = end
    return keys


def tail_key(last: str, tokens: Sequence[int]) -> str:
    """The key of exact tokens after the page of key `last`."""
    return hashlib.sha256(b"tail" + bytes.fromhex(last) + token_bytes(tokens)).digest()[:KEY_NBYTES].hex()


def token_bytes(tokens: Sequence[int]) -> bytes:
    """4 bytes per text token, as always; 8 for all of them if there are media tokens."""
    return np.array(tokens, "<u8" if any(token >= FIRST_MEDIA_ID for token in tokens) else "<u4").tobytes()


def state_key(tail: str) -> str:
    """The key of the states after all tokens; `tail` is the key of the exact tokens after the last page."""
    return hashlib.sha256(b"state" + bytes.fromhex(tail)).digest()[:KEY_NBYTES].hex()


def save_cache(engine: Engine, store: SessionStore, own: Mapping[str, object],
               tokenized_text: TokenizedText | None) -> Iterator[Progress | SavedCache]:
    """Write the cache's contents, while `store.writing`; yields its description last, if it holds anything. Raises OSError; PagesLost,
    after the description of what precedes the first lost page, if anything does."""
    if engine.cache.resumable < engine.cache.n == len(engine.tokens):  # what lies after the last page would be lost on resuming
        remaining = engine.cache.truncate(engine.cache.resumable)
        engine.set_tokens(engine.tokens[:remaining], min(engine.num_fresh_tokens, remaining))
    # Captured now, since the engine's own values shrink when a page is lost.
    cache, tokens, num_fresh_tokens = engine.cache, engine.tokens, engine.num_fresh_tokens
    if not tokens or cache.n != len(tokens) or cache.upgraded_codecs:  # pages of mixed precision are recomputed instead
        return
    keys = page_keys(own, tokens, cache.shape.sinks, cache.sealed)
    total, pages = cache.sealed * cache.kept_nbytes, []
    sinks = _keep_exact(cache, store, keys[0], _sinks_and_tail(cache)[0])
    for page in range(cache.sealed):
        try:
            with engine.keeping_intact_prefix():
                layers = cache.read(page)
        except PagesLost:
            if pages and cache.states is None:  # states do not exist at page ends
                intact = tokens[: cache.shape.sinks + PAGE * page]
                yield SavedCache(own, tuple(intact), tuple(pages), sinks, None, tokenized_text, min(num_fresh_tokens, len(intact)),
                                 kernel_identity(engine))
            raise
        pages.append(store.store_page(keys[page + 1], [memoryview(data) for data in layers]))
        yield Progress("saving the session", (page + 1) * cache.kept_nbytes, total, "bytes")
    key = tail_key(keys[-1], tokens[cache.shape.sinks + PAGE * cache.sealed :])
    tail = _keep_exact(cache, store, key, _sinks_and_tail(cache)[1])
    state = None
    if cache.states is not None:
        state = store.store_page(state_key(key), [memoryview(data) for data in cache.states.read(cache.n)])
    yield SavedCache(own, tuple(tokens), tuple(pages), sinks, tail, tokenized_text, num_fresh_tokens, kernel_identity(engine), state)


def _keep_exact(cache: KVCache, store: SessionStore, key: str, blocks: Sequence[tuple[int, int]]) -> PageFile | None:
    """Write the exact tokens of `blocks`; None if there are none."""
    if not blocks:
        return None
    pages, num_layers = [cache.read(page) for page, _ in blocks], len(cache.own_layouts)
    packed = pack_exact([layers[:num_layers] for layers in pages], [count for _, count in blocks], cache.own_layouts)
    return store.store_page(key, [packed, *(memoryview(data) for layers in pages for data in layers[num_layers:])])


def _sinks_and_tail(cache: KVCache) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """`exact_blocks` of the sinks, and of the pages after the sealed ones."""
    blocks = cache.exact_blocks()
    return [block for block in blocks if block[0] < 0], [block for block in blocks if block[0] >= 0]


def restore_cache(engine: Engine, store: SessionStore, session: SavedSession) -> Iterator[Progress]:
    """Restore a session's cache into the engine, after `refuse_other`. On failure the engine's cache is empty. Raises ContextOverflow if it
    exceeds the context, EffllmError naming the session and the page for damaged files."""
    saved, cache = session.cache, engine.cache
    tokens = saved.tokens
    if len(tokens) > engine.n_ctx:
        raise ContextOverflow(f"session {session.name} holds {len(tokens)} tokens and the context {engine.n_ctx}",
                              f"-c {len(tokens) + 1} or more")
    try:
        known_ids = (*tokens, *(saved.tokenized_text.ids if saved.tokenized_text else ()))
        if any(token >= engine.config.vocab_size for token in text_ids(known_ids)):
            raise ValueError("tokens that the model does not have")
        keys = page_keys(saved.identity, tokens, cache.shape.sinks, saved.sealed)
        keys.append(tail_key(keys[-1], tokens[cache.shape.sinks + PAGE * saved.sealed :]))
        keys.append(state_key(keys[-1]))
        files = saved.sinks, *saved.pages, saved.tail, saved.state
        if any(file is not None and file.key != key for file, key in zip(files, keys, strict=True)):
            raise ValueError("pages of other tokens")
        engine.reset()
        cache.adopt(len(tokens), saved.sealed)
        for page, file in enumerate(saved.pages):
            put_page(engine, store, file, page)
            yield Progress("restoring the session", (page + 1) * cache.kept_nbytes, saved.sealed * cache.kept_nbytes, "bytes")
        for file, blocks in zip((saved.sinks, saved.tail), _sinks_and_tail(cache)):
            put_exact(engine, store, file, blocks)
        put_state(engine, store, saved.state)
    except (DamagedPage, ValueError) as error:
        engine.reset()
        raise EffllmError(f"session {session.name} is damaged: {error}",
                          f"{rm_command(session.name, more='--cache')} keeps its text, which is then read again") from error
    except BaseException:
        engine.reset()
        raise
    engine.set_tokens(tokens, saved.num_fresh_tokens if saved.kernel_identity == kernel_identity(engine) else 0)


def put_page(engine: Engine, store: SessionStore, file: PageFile, page: int) -> None:
    """Load a sealed page from its file. Raises DamagedPage."""
    cache = engine.cache
    first = cache.shape.sinks + PAGE * page
    try:
        if file.nbytes != cache.kept_nbytes:  # checked before allocating as much as the session claims
            raise ValueError(f"{file.nbytes} bytes for a page of {cache.kept_nbytes}")
        data = np.frombuffer(store.read_page(file), np.uint8)
        layers, offset = [], 0
        for layer, (codec, layout) in enumerate(zip(cache.codecs, cache.layouts)):
            nbytes = codec.layout(layout.kv_heads, layout.head_dim).layer_page_nbytes
            layers.append(data[offset : offset + nbytes])
            check_stored(codec, layers[-1], layout, layer, first)
            offset += nbytes
        layers += _index_keys(cache, data[offset:], PAGE)
    except (DamagedPage, ValueError) as error:
        raise DamagedPage(f"the page of tokens {first} to {first + PAGE - 1} {_reason(error)}") from error
    cache.write(page, layers)


def put_exact(engine: Engine, store: SessionStore, file: PageFile | None, blocks: Sequence[tuple[int, int]]) -> None:
    """Load exact tokens from their file into the slots of `blocks`. Raises DamagedPage."""
    if (file is None) != (not blocks):
        raise DamagedPage("its exact tokens are not those of its length")
    if file is None:
        return
    cache = engine.cache
    counts = [count for _, count in blocks]
    try:
        index_nbytes = sum(counts) * sum(cache.index_sizes)
        if not index_nbytes <= file.nbytes <= most_exact(counts, cache.own_layouts) + index_nbytes:
            raise ValueError(f"{file.nbytes} bytes are more than they take")
        data = store.read_page(file)
        end = len(data) - index_nbytes
        pages = unpack_exact(data[:end], counts, cache.own_layouts)
        for layers, count in zip(pages, counts, strict=True):
            layers += _index_keys(cache, np.frombuffer(data, np.uint8)[end:], count)
            end += count * sum(cache.index_sizes)
    except (DamagedPage, ValueError) as error:
        raise DamagedPage(f"the file of {sum(counts)} exact tokens {_reason(error)}") from error
    for (page, _), layers in zip(blocks, pages, strict=True):
        cache.write(page, layers)


def _index_keys(cache: KVCache, data: np.ndarray, tokens: int) -> list[np.ndarray]:
    """The index keys at the start of `data`, for `tokens` tokens of each layer with an indexer. Raises ValueError for NaN or infinity."""
    keys, offset = [], 0
    for index, size in zip(cache.indexes, cache.index_sizes, strict=True):
        keys.append(data[offset : offset + tokens * size])
        offset += tokens * size
        if not np.isfinite(keys[-1].view(np.float32 if index.stored == F32 else np.float16)).all():
            raise ValueError("NaN or infinity")
    return keys


def put_state(engine: Engine, store: SessionStore, file: PageFile | None) -> None:
    """Load the states after all tokens in the cache from their file. Raises DamagedPage."""
    states = engine.cache.states
    if (file is None) != (states is None):
        raise DamagedPage("it has a state, and the model none" if states is None else "it lacks the state of linear attention")
    if file is None:
        return
    try:
        if file.nbytes != states.saved_nbytes:
            raise ValueError(f"{file.nbytes} bytes for states of {states.saved_nbytes}")
        data = np.frombuffer(store.read_page(file), np.uint8)
        if not np.isfinite(data.view("<f4")).all():
            raise ValueError("NaN or infinity")
    except (DamagedPage, ValueError) as error:
        raise DamagedPage(f"the state behind {engine.cache.n} tokens {_reason(error)}") from error
    states.write(engine.cache.n, np.split(data, np.cumsum(states.slot_nbytes)[:-1]))


def _reason(error: Exception) -> str:
    return error.message if isinstance(error, DamagedPage) else f"is not what it says: {error}"
