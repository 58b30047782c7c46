"""A model: tensors by role, blocks on their backends, one forward pass.

Shapes and types are checked against the config before a byte of weights is read. Between two backends activations pass through the host.
Weights are leased layer by layer even when all are resident, so a pager that streams them changes nothing here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np

from .. import DoesNotFit
from ..kernels.layout import MAX_DECODE_TOKENS
from ..offload.checkpoint import TensorStore
from ..offload.notes import Fallback
from ..offload.resident_pager import ResidentPager
from . import families
from .adapters.loaded_adapters import NO_ADAPTERS, LoadedAdapters
from .cache import KVCache
from .config import ModelConfig
from .families import VISION_PREFIX, expert_of
from .images.media_embeddings import MediaEmbeddings
from .images.vision_experts import vision_routing
from .kv.bidirectional import attention_ends
from .kv.cross_attention_cache import NO_IMAGES, CrossAttentionCache, CrossAttentionLayer, ImageSpan
from .kv.layer_cache import for_last_tokens
from .last_layers import first_last_token_layer, narrows_to_last_tokens, num_last_tokens_of
from .layer import Layer, LayerWeights, Tap, last_of, no_tap
from .ngrams import away_nbytes, held, is_table
from .rope import rope_tables, with_learned_frequencies
from .sparse.activation_predictors import FEW, Predictors
from .speculation.mtp_tensors import MTP
from .stores.container import Container
from .tensors import as_float32, check_tensors, parameters, typed
from .weights import gpu_head
from .weights.layer_upload import HostCacheBridge, LayerUploader
from .weights.outliers import check_outliers
from .weights.paged_experts import PagedExperts, Paging
from .weights.shared_block_weights import blocks_of, uses
from .weights.store_reads import StoreReads, clip_to_table
from .weights.stream_layout import TABLES
from .weights.streamed_weights import StreamedWeights, StreamingPlan
from .weights.weight_records import OuterWeights, WeightRecords


class Model(StoreReads):
    """A model's weights and its forward pass.

    `devices`: the device of each layer. `backends`: ops by device name. The embedding runs on the CPU, and so does the head unless
    `head_on_gpu`. `copied_from`: passes of at least this many tokens copy the host's layers to the GPU. `predictors`: of neurons that are
    read from disk when they are active. `between_layers`: layers before which a pass keeps its hidden states, for trained drafts.
    """

    def __init__(self, config: ModelConfig, store: TensorStore, devices: Sequence[str], backends: Mapping[str, object], ctx: int,
                 mmap: bool = False, container: Container | None = None, streaming: StreamingPlan | PagedExperts | None = None,
                 copied_from: int | None = None, predictors: Predictors | None = None, head_on_gpu: bool = False,
                 mtp: bool = False, adapters: LoadedAdapters = NO_ADAPTERS, between_layers: Sequence[int] = ()) -> None:
        self.between = tuple(between_layers)
        self.config, self.store, self.devices, self.backends = config, store, tuple(devices), backends
        self.tensors = check_tensors(config, store, container, mtp)
        check_outliers(self.tensors, store)
        self.ropes = rope_tables(config, ctx)
        if config.learned_rope_alpha:
            alpha = self.tensors["outer"]["rope_alpha"]
            self.ropes = with_learned_frequencies(self.ropes, as_float32(alpha, {alpha.name: store.read(alpha.info)}))
        host_infos = {key: [tensor.info for tensor in (held(roles) if key == "outer" else roles).values()]
                      for key, roles in self.tensors.items() if key == "outer" or devices[key] == "cpu"}
        self.pager = ResidentPager(store, host_infos, mmap=mmap) if streaming is None else streaming.pager(store)
        self.streamed = None if streaming is None else StreamedWeights(streaming.parts, self.pager)
        self.paging = Paging(streaming, self.pager) if isinstance(streaming, PagedExperts) else None
        self.records = WeightRecords(config, self.tensors, store, backends["cpu"], self.pager, self.streamed, self.paging, adapters)
        self.block, self._first_narrow = families.get(config.family).block, first_last_token_layer(config)
        self._narrows = [narrows_to_last_tokens(config, layer) for layer in range(config.num_hidden_layers)]
        self.lut_tensors: set[str] = set()  # tensors whose codes are in lookup order in the pager's memory (`lookup_layout.py`)
        self._wrapped: dict[int | str, tuple[Mapping[str, np.ndarray], object]] = {}  # records by layer or "outer", and their memory
        # Recorded passes, by number of tokens: the buffer their ids are read from, and the states they return.
        self._recorded_ids: dict[int, np.ndarray] = {}
        self._recorded_outputs: dict[int, object] = {}
        # State of the current pass.
        self._media: MediaEmbeddings | None = None
        self._rope_positions: np.ndarray | None = None  # if not the cache's
        self._extra_inputs: Mapping[int, object] | None = None  # by layer, see `_layer_inputs`
        self._num_last: int | None = None  # tokens for which the last layers run, None: all
        self._images: tuple[Sequence[ImageSpan], np.ndarray | None] = ((), None)  # images to cross-attend to, LoRA scales
        self.cross_attention: CrossAttentionCache | None = None  # keys and values of images, for cross-attention layers
        self._gpu_layers: dict[int, LayerWeights] = {}
        self.predictors = predictors
        self._copied_from, self._head_on_gpu, self.uploader, self.gpu_output_head = copied_from, head_on_gpu, None, None
        self._announcements: list[str] = []

    @property
    def copied_from(self) -> int | None:
        """From this many tokens on, a pass copies the host's layers to the GPU; None: never."""
        return None if self.uploader is None or self.lut_tensors else self._copied_from

    @property
    def nbytes(self) -> int:
        """Bytes of weights on all tiers."""
        return sum(tensor.nbytes for roles in self.tensors.values() for tensor in roles.values() if not tensor.turn)

    @property
    def bytes_per_pass(self) -> int:
        """Bytes of weights that decoding a token reads: without an untied embedding, MTP layer, and experts not visited."""
        outer, mixture = self.tensors["outer"], self.config.moe
        nbytes = self.nbytes - sum(outer[role].nbytes for role in TABLES if role in outer and (role != "embed" or "head" in outer))
        nbytes -= sum(tensor.nbytes for role, tensor in outer.items() if role.startswith(MTP) or is_table(role))
        layer_tensors = [item for roles in self.tensors.values() for item in roles.items()]
        expert_nbytes = sum(tensor.nbytes for role, tensor in layer_tensors if expert_of(role) is not None)
        stored = mixture.num_experts + mixture.zero_experts if mixture else 0
        nbytes += sum((uses(self.config, role) - 1) * tensor.nbytes for role, tensor in blocks_of(outer).items())
        nbytes += sum(tensor.nbytes for _, tensor in layer_tensors if tensor.turn)
        nbytes -= sum(tensor.nbytes for role, tensor in layer_tensors if role.startswith(VISION_PREFIX))
        return nbytes - (expert_nbytes * (stored - mixture.experts_per_token) // stored if expert_nbytes else 0)

    @property
    def bits_per_value(self) -> float:
        """Stored bits per parameter."""
        return 8 * self.nbytes / parameters(self.tensors)

    def load(self) -> Iterator[tuple[int, int]]:
        """Load the resident weights; yields (bytes done, total bytes)."""
        gpu_tensors = [tensor for layer, device in enumerate(self.devices) if device != "cpu" for tensor in self.tensors[layer].values()]
        if self.pager.resident:
            repeated_nbytes = sum(tensor.nbytes for tensor in gpu_tensors if tensor.turn)  # copied again for each layer that shares them
            total = self.nbytes + repeated_nbytes - away_nbytes(self.tensors["outer"])
        else:
            total = self.pager.load_nbytes + sum(tensor.nbytes for tensor in gpu_tensors)
        done = 0
        for done, _ in self.pager.load():
            yield done, total
        for layer, device in enumerate(self.devices):
            if device != "cpu":
                roles = self.tensors[layer]
                raw = {tensor.name: self.store.read(tensor.info) for tensor in roles.values()}
                self._gpu_layers[layer] = self.records.layer(layer, raw, self.backends[device])
                done += sum(info.nbytes for info in roles.values())
                yield done, total
        if self._head_on_gpu:
            self._load_gpu_head()
        if self._copied_from is not None:
            self._open_uploader()

    def _load_gpu_head(self) -> None:
        with self.pager.lease("outer") as raw:
            head = gpu_head.head_tensor(self.tensors["outer"])
            data = raw[head.name] if head.name in raw else self.store.read(head.info)
            pre_head = self.records.before_head(raw)
            norm, bias = pre_head.norm if pre_head else self.records.last_norm(raw), self.records.head_bias(raw)
            self.gpu_output_head = gpu_head.head_on_gpu(self.backends["cuda"], self.config, head, typed(data, head.spec), norm, bias)

    def _open_uploader(self) -> None:
        """Take the buffers for copied layers; without room for them those layers are computed on the CPU."""
        host_layers = [layer for layer, device in enumerate(self.devices) if device == "cpu"]
        try:
            with self._within_memory("the system gives no more pinned memory"):
                self.uploader = LayerUploader(self.backends["cuda"], host_layers, self.tensors, self.pager.lease, self.records.layer)
        except DoesNotFit as error:
            self._announcements.append(Fallback("the CPU's layers are not copied to the GPU but computed where they lie: "
                                                f"{error.message}"))

    def announcements(self) -> list[str]:
        """Fallbacks since the last call."""
        if "cuda" in self.devices:
            self._announcements += map(Fallback, self.backends["cuda"].announcements())
        announced, self._announcements = self._announcements, []
        return announced

    def _within_memory(self, message: str) -> AbstractContextManager[None]:
        """Context manager that reports GPU out-of-memory as `message`; does nothing without layers on a GPU."""
        return self.backends["cuda"].within_memory(message) if "cuda" in self.devices else nullcontext()

    def close(self) -> None:
        """Free the weights and close their files. The backends belong to the engine and stay open."""
        if self.uploader is not None:
            self.uploader.close()
        self._wrapped.clear()
        self._gpu_layers.clear()
        self.gpu_output_head = None
        if self.paging is not None:
            self.paging.close()
        self.pager.close()
        self.store.close()

    @contextmanager
    def layer(self, index: int) -> Iterator[LayerWeights]:
        """Lease a layer's weights, on its backend."""
        if index in self._gpu_layers:
            yield self._gpu_layers[index]
            return
        with self.pager.lease(index) as raw:
            yield self._lease(index, raw)

    @contextmanager
    def outer(self) -> Iterator[OuterWeights]:
        """Lease the weights outside the layers."""
        with self.pager.lease("outer") as raw:
            yield self._lease("outer", raw)

    def _lease(self, key: int | str, raw: Mapping[str, np.ndarray]) -> object:
        """Records over leased memory, reused while its address stays the same."""
        if key not in self._wrapped or self._wrapped[key][0] is not raw:
            host = self.backends["cpu"]
            records = self.records.outer(raw) if key == "outer" else self.records.layer(key, raw, host, lut_tensors=self.lut_tensors)
            self._wrapped[key] = (raw, records)
        return self._wrapped[key][1]

    def forward(self, ids: np.ndarray, cache: KVCache, tap: Tap = no_tap, commit: bool = True, prompt: bool = False,
                scales: np.ndarray | None = None, media: MediaEmbeddings | None = None, rope_positions: np.ndarray | None = None,
                image_spans: Sequence[ImageSpan] = (), num_states: int | None = None) -> np.ndarray:
        """Run `ids` int64 [T] after what is cached; returns the last hidden states on the host, float32 [T, D], before the final norm.

        `tap`: called with intermediate results. `commit`: False leaves the tokens uncommitted; the caller then calls `cache.commit`.
        `prompt`: see `KVCache.begin`. `scales`: LoRA scales float32 [1, adapters], or a row for each token if the tokens belong to several
        sequences; None without adapters. `media`: rows that replace some tokens' embeddings. `rope_positions`: rotary positions [T] or
        [T, pairs], if not the cache's. `image_spans`: which tokens cross-attend to which images. `num_states`: how many of the last
        tokens' states are needed, None for all; the result may then have fewer rows, as the last layers run for few tokens.
        """
        step, cache.ends = cache.begin(len(ids), prompt), attention_ends(self.config, cache, len(ids), media)
        host = self.backends["cpu"]
        if self.records.adapters.names:
            for backend in self.backends.values():
                backend.adapt(scales)
        if not self.pager.resident:
            self.store.check_unchanged()
        if tap is no_tap and cache.probes is not None and cache.probes.begin(step.positions):
            tap = cache.probes.see
        self._media, self._rope_positions, self._images = media, rope_positions, (image_spans, scales)
        self._extra_inputs = vision_routing(self.config.moe, ids, media)
        needs_all_states = tap is not no_tap or image_spans or self.between or (media is not None and media.deepstack_rows is not None)
        self._num_last = None if needs_all_states else num_last_tokens_of(len(ids), num_states)
        if image_spans:
            self.cross_attention.begin(image_spans)
        record_key = step.blocks if self._is_repeatable(len(ids), cache, tap) else None
        if tap is not no_tap:
            tap = _after_flush(host, tap)
        if record_key is not None:
            self._recorded_ids.setdefault(len(ids), np.zeros(len(ids), np.int64))[:] = ids
        with self._within_memory("the GPU ran out of memory during a pass"), host.collecting():
            with self.pager.lease("outer") as raw:
                outer = self._lease("outer", raw)
                embeds_in_record = record_key is not None and outer.embeds_by_kernel and not self.config.residual_streams
                x = None if embeds_in_record else self._embed(ids, outer, step.positions, media)
                self._extra_inputs = self._layer_inputs(ids, x, outer, cache) or self._extra_inputs
                if self.config.residual_streams:
                    x = host.enter_streams(x, outer.stream_inputs, self.config.residual_streams)
                    if not self.pager.stays:
                        host.flush()
            if record_key is not None and host.replay(record_key, len(ids), step.position):
                x = self._recorded_outputs[len(ids)]
            else:
                with host.recording(record_key, len(ids)):
                    if embeds_in_record:
                        x = self._embed(self._recorded_ids[len(ids)], outer, step.positions)
                    x = self._layers(x, cache, tap, num_states)
                self._recorded_outputs[len(ids)] = x
        if commit:
            cache.commit()
        return x

    def _is_repeatable(self, tokens: int, cache: KVCache, tap: Tap) -> bool:
        """May this pass be recorded and replayed? One of few tokens repeats the last one of as many, as long as the weights stay where
        they are and the cache's list of blocks is the same. The first pass of a run cannot: it finds out in what order layers follow."""
        if tokens > MAX_DECODE_TOKENS or not self.pager.stays or self._gpu_layers or len(self._wrapped) <= len(self.devices):
            return False
        is_plain = self._media is None and self._rope_positions is None and self._extra_inputs is None and not self._images[0]
        return is_plain and tap is no_tap and cache.ends is None

    def _layer_inputs(self, ids: np.ndarray, x: object, outer: OuterWeights, cache: KVCache) -> Mapping[int, object]:
        """Per-layer inputs of the tokens beside the residual stream: input embeddings, routed experts, or n-gram rows."""
        config, host = self.config, self.backends["cpu"]
        if outer.ngrams:
            ngrams = config.ngrams
            words = {layer: cache.layer(layer).words(ids, ngrams.eos_token_id) for layer in ngrams.layers}
            return {layer: host.ngram_rows(ngrams.row_ids(layer, words[layer]), table, index)
                    for index, (layer, table) in enumerate(outer.ngrams.items())}
        if outer.hash_routing:
            return host.picked_experts(ids, outer.hash_routing, config.moe.num_experts)
        if outer.per_layer_inputs is None:
            return {}
        table, *projections = outer.per_layer_inputs
        clipped_ids = ids if table is None else clip_to_table(ids, config.per_layer_input_vocab)
        return dict(enumerate(host.layer_inputs(clipped_ids, x, table, *projections, config.per_layer_input_multiplier)))

    def _embed(self, ids: np.ndarray, outer: OuterWeights, positions: np.ndarray, media: MediaEmbeddings | None = None) -> np.ndarray:
        config = self.config
        learned_positions = None if config.position_offset is None else positions + config.position_offset
        return self.backends["cpu"].embed(ids, outer.embed, config.embedding_multiplier, learned_positions, outer.positions,
                                          media and media.insert_into)

    def _layers(self, x: object, cache: KVCache, tap: Tap, num_states: int | None = None) -> object:
        """All blocks, each on its backend: the host's x[T, D], or with several streams [T, S * D] -> x[T, D]."""
        current, host, positions = "cpu", self.backends["cpu"], cache.step.positions
        ops, copied_from = host, self.copied_from
        copies = copied_from is not None and len(positions) >= copied_from
        for layer, home in enumerate(self.devices):
            if layer == self._first_narrow and self._num_last is not None:
                x = last_of(x, self._num_last)
                if num_states == 0 and self.pager.resident and not copies:
                    break
                self._rope_positions = last_of(positions if self._rope_positions is None else self._rope_positions, self._num_last)
            if layer in self.between:
                host.kept(x, self.between.index(layer), len(self.between))
            device = "cuda" if copies else home
            if device == "cuda" and not copies and tap is no_tap and self._can_replay_on_gpu(cache, layer):
                hidden = ops.to_host(x)
                current, ops = device, self.backends[device]
                x = ops.repeat(hidden, cache.step.blocks, positions, lambda x, first=layer: self._run_on_gpu(x, cache, first))
                break
            if device != current:
                x, current, ops = self.backends[device].from_host(ops.to_host(x)), device, self.backends[device]
            if copies and home == "cpu":
                with self.uploader.layer(layer) as w:
                    x = self._block(layer, ops, w, x, cache, tap)
            elif device == "cpu":
                if self.predictors is not None and len(positions) <= FEW:
                    self.pager.layers[layer].expect(self.predictors.layers[layer].active(host.to_host(x)))
                with self.pager.lease(layer) as raw:
                    x = self._block(layer, ops, self._lease(layer, raw), x, cache, tap)
                    if not self.pager.stays:  # its memory may be reused after the lease
                        host.flush()
            else:
                x = self._block(layer, ops, self._gpu_layers[layer], x, cache, tap)
            x = x if self._media is None else self._media.add_deepstack(ops, x, layer)
        x = x if current == "cpu" else host.from_host(ops.to_host(x))
        if not self.config.residual_streams:
            return x
        with self.pager.lease("outer") as raw:
            outer = self._lease("outer", raw)
            if outer.stream_merge:
                x = host.read_streams(x, outer.stream_merge)
            else:
                x = host.leave_streams(x, outer.stream_outputs, self.config.residual_streams)
            if not self.pager.stays:
                host.flush()
        return x

    def _block(self, layer: int, ops: object, w: LayerWeights, x: object, cache: KVCache, tap: Tap) -> object:
        """One block on the backend of `ops`. If that is a GPU and the layer's cache is on the host, attention runs on the host."""
        host, config = self.backends["cpu"], self.config
        is_cross_attention = layer in config.cross_attention_layers
        kv = self._cross_attention_of(layer) if is_cross_attention else cache.layer(layer)
        if self._num_last is not None and self._narrows[layer] and not is_cross_attention:
            kv = for_last_tokens(kv, self._num_last)
        if ops is not host and not is_cross_attention and self.devices[config.kv_sources[layer] if config.kv_sources else layer] == "cpu":
            kv = HostCacheBridge(kv, ops, host)
        positions = cache.step.positions if self._rope_positions is None else self._rope_positions
        at = Layer(ops, w, kv, positions, self.ropes[layer], config, layer, tap)
        extra = None if self._extra_inputs is None else self._extra_inputs.get(layer)
        if extra is None:
            return self.block(x, at)
        if self._num_last is not None and layer >= self._first_narrow:
            extra = last_of(extra, self._num_last)
        return self.block(x, at, extra if ops is host or isinstance(extra, tuple) else ops.from_host(extra))

    def _cross_attention_of(self, layer: int) -> CrossAttentionLayer:
        """The image rows that a cross-attention layer attends to in this pass."""
        image_spans, scales = self._images
        return self.cross_attention.layer(layer, image_spans, scales) if image_spans else NO_IMAGES

    def _can_replay_on_gpu(self, cache: KVCache, first: int) -> bool:
        """May the GPU replay, for the blocks from `first` on, what it recorded in the last pass? Windows, routing, packed pages and
        state slots are decided on the host."""
        config = self.config
        if len(cache.step.positions) > MAX_DECODE_TOKENS or "cpu" in self.devices[first:]:
            return False
        is_plain = self._media is None and self._rope_positions is None and self._extra_inputs is None and not self._images[0]
        is_simple = not any(config.windows) and not config.kv_sources and not cache.is_packed
        return is_plain and is_simple and config.moe is None and config.recurrent is None

    def _run_on_gpu(self, x: object, cache: KVCache, first: int) -> object:
        """Run the blocks from `first` on, all of them on the GPU."""
        for layer in range(first, len(self.devices)):
            x = self._block(layer, self.backends["cuda"], self._gpu_layers[layer], x, cache, no_tap)
        return x

    def logits(self, x: np.ndarray) -> np.ndarray:
        """Logits of hidden states `[T, D]` -> float32 `[T, V]`, a view of the workspace."""
        config, host = self.config, self.backends["cpu"]
        with self.outer() as outer:
            norm, before = outer.norm, outer.pre_head
            if before is not None:
                x, norm = host.gated_hidden(x, norm, None, before.matrix, before.act), before.norm
            if self.gpu_output_head is None:
                return host.logits(x, norm, outer.head, config.final_logit_softcapping, 1 / config.logits_scaling)
            host.flush()
        with self._within_memory("the GPU ran out of memory for logits"):
            return self.gpu_output_head.logits(x)


def _after_flush(host: object, tap: Tap) -> Tap:
    """A tap that flushes pending ops first, so that it sees their results."""

    def see(name: str, layer: int, value: object) -> None:
        host.flush()
        tap(name, layer, value)

    return see
