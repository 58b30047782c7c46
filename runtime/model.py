"""A model: tensors by role, blocks on their backends, one forward pass.

Shapes and types are checked against the config before a byte of weights is read. A block runs on the backend that the plan gives it;
between two backends activations pass through the host. Weights are leased layer by layer even when all are resident, so a pager that
streams them changes nothing here.
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
from .families import SEEN, expert_of
from .images.media import MediaEmbeddings
from .images.vision_experts import vision_routing
from .kv.bidirectional import attention_ends
from .kv.cross_attention_cache import NO_IMAGES, CrossAttentionCache, CrossAttentionLayer, ImageSpan
from .kv.layer_cache import for_last_tokens
from .last_layers import first_alone, kept_of, narrows
from .layer import Layer, LayerWeights, Tap, last_of, no_tap
from .ngrams import away_nbytes, held, is_table
from .rope import learned, rope_tables
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
    """`backends` maps device names to ops; `devices` names each layer's. The embedding runs on the host's backend, and so does the head
    unless `head_on_card`."""

    def __init__(self, config: ModelConfig, store: TensorStore, devices: Sequence[str], backends: Mapping[str, object], ctx: int,
                 mmap: bool = False, container: Container | None = None, streams: StreamingPlan | PagedExperts | None = None,
                 copied_from: int | None = None, predictors: Predictors | None = None, head_on_gpu: bool = False,
                 mtp: bool = False, adapted: LoadedAdapters = NO_ADAPTERS, between: Sequence[int] = ()) -> None:
        self.between = tuple(between)  # layers before which a pass keeps its states
        self.config, self.store, self.devices, self.backends = config, store, tuple(devices), backends
        self.tensors = check_tensors(config, store, container, mtp)
        check_outliers(self.tensors, store)
        self.ropes = rope_tables(config, ctx)
        if config.frequencies_learned:
            own = self.tensors["outer"]["rope_alpha"]
            self.ropes = learned(self.ropes, as_float32(own, {own.name: store.read(own.info)}))
        host = {key: [tensor.info for tensor in (held(roles) if key == "outer" else roles).values()] for key, roles in self.tensors.items()
                if key == "outer" or devices[key] == "cpu"}
        self.pager = ResidentPager(store, host, mmap=mmap) if streams is None else streams.pager(store)
        self.streamed = None if streams is None else StreamedWeights(streams.parts, self.pager)
        self.paging = Paging(streams, self.pager) if isinstance(streams, PagedExperts) else None
        self.records = WeightRecords(config, self.tensors, store, backends["cpu"], self.pager, self.streamed, self.paging, adapted)
        self.block, self._alone = families.get(config.family).block, first_alone(config)
        self._narrows = [narrows(config, layer) for layer in range(config.num_hidden_layers)]
        self.looked_up: set[str] = set()  # tensors whose codes lie in lookup order in the pager's memory (`lookup_layout.py`)
        self._wrapped: dict[int | str, tuple[Mapping[str, np.ndarray], object]] = {}
        self._ids: dict[int, np.ndarray] = {}  # of passes that are repeated, by tokens: where ids are read
        self._repeated: dict[int, object] = {}  # and what is returned
        # Of the pass in hand, as is told; given to layers beside x, [T, P] by layer; how many tokens the last layers run for, None: all.
        self._shown = self._turned = self._given = self._last = None
        self._seen: tuple[Sequence[ImageSpan], np.ndarray | None] = ((), None)  # of the pass in hand, which pictures are seen
        self.pictures: CrossAttentionCache | None = None  # where layers of cross attention look
        self._on_device: dict[int, LayerWeights] = {}
        self.predictors = predictors  # of neurons that are read when they are active
        self._copied_from, self._head_on_gpu, self.uploader, self.gpu_output_head = copied_from, head_on_gpu, None, None
        self._said: list[str] = []

    @property
    def copied_from(self) -> int | None:
        """From this many tokens on, a pass copies the host's layers to the GPU; None: never."""
        return None if self.uploader is None or self.looked_up else self._copied_from

    @property
    def nbytes(self) -> int:
        """Bytes of weights on all tiers."""
        return sum(tensor.nbytes for roles in self.tensors.values() for tensor in roles.values() if not tensor.turn)

    @property
    def bytes_per_pass(self) -> int:
        """Bytes of weights that decoding a token reads: without an untied embedding, MTP layer, and experts not visited."""
        outer, own = self.tensors["outer"], self.config.mixture
        nbytes = self.nbytes - sum(outer[role].nbytes for role in TABLES if role in outer and (role != "embed" or "head" in outer))
        nbytes -= sum(tensor.nbytes for role, tensor in outer.items() if role.startswith(MTP) or is_table(role))
        nbytes -= sum(tensor.nbytes for roles in self.tensors.values() for role, tensor in roles.items() if role.startswith(SEEN))
        experts = sum(tensor.nbytes for roles in self.tensors.values() for role, tensor in roles.items() if expert_of(role) is not None)
        chosen = own.experts + own.handed if own else 0
        nbytes += sum((uses(self.config, role) - 1) * tensor.nbytes for role, tensor in blocks_of(outer).items())
        nbytes += sum(tensor.nbytes for roles in self.tensors.values() for tensor in roles.values() if tensor.turn)
        return nbytes - (experts * (chosen - own.per_token) // chosen if experts else 0)

    @property
    def bits_per_value(self) -> float:
        """Stored bits per parameter."""
        return 8 * self.nbytes / parameters(self.tensors)

    def load(self) -> Iterator[tuple[int, int]]:
        """Load the resident weights; yields (bytes done, total bytes)."""
        gpu_tensors = [own for i, device in enumerate(self.devices) if device != "cpu" for own in self.tensors[i].values()]
        gpu_nbytes, again = (sum(own.nbytes for own in gpu_tensors if own.turn or each) for each in (True, False))
        here = self.nbytes + again - away_nbytes(self.tensors["outer"])
        total, done = here if self.pager.resident else self.pager.load_nbytes + gpu_nbytes, 0
        for done, _ in self.pager.load():
            yield done, total
        for layer, device in enumerate(self.devices):
            if device != "cpu":
                roles = self.tensors[layer]
                raw = {tensor.name: self.store.read(tensor.info) for tensor in roles.values()}
                self._on_device[layer] = self.records.layer(layer, raw, self.backends[device])
                done += sum(info.nbytes for info in roles.values())
                yield done, total
        if self._head_on_gpu:
            with self.pager.lease("outer") as raw:
                head = gpu_head.head_tensor(self.tensors["outer"])
                data = raw[head.name] if head.name in raw else self.store.read(head.info)
                before = self.records.before_head(raw)
                norm, bias = before.norm if before else self.records.last_norm(raw), self.records.head_bias(raw)
                self.gpu_output_head = gpu_head.head_on_gpu(self.backends["cuda"], self.config, head, typed(data, head.spec), norm, bias)
        if self._copied_from is not None:
            hosts = [layer for layer, device in enumerate(self.devices) if device == "cpu"]
            try:
                with self._within_memory("the system gives no more pinned memory"):
                    self.uploader = LayerUploader(self.backends["cuda"], hosts, self.tensors, self.pager.lease, self.records.layer)
            except DoesNotFit as error:
                self._said.append(Fallback(f"the CPU's layers are not copied to the GPU but computed where they lie: {error.message}"))

    def announcements(self) -> list[str]:
        """Fallbacks since the last call."""
        if "cuda" in self.devices:
            self._said += map(Fallback, self.backends["cuda"].announcements())
        said, self._said = self._said, []
        return said

    def _within_memory(self, message: str) -> AbstractContextManager[None]:
        """Context manager that reports GPU out-of-memory as `message`; does nothing without layers on a GPU."""
        return self.backends["cuda"].within_memory(message) if "cuda" in self.devices else nullcontext()

    def close(self) -> None:
        """Free the weights and close their files. The backends belong to the engine and stay open."""
        if self.uploader is not None:
            self.uploader.close()
        self._wrapped.clear()
        self._on_device.clear()
        self.gpu_output_head = None
        if self.paging is not None:
            self.paging.close()
        self.pager.close()
        self.store.close()

    # -- weights ---------------------------------------------------------------------------------------------------------------

    @contextmanager
    def layer(self, index: int) -> Iterator[LayerWeights]:
        """Lease a layer's weights, on its backend."""
        if index in self._on_device:
            yield self._on_device[index]
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
            made = self.records.outer(raw) if key == "outer" else self.records.layer(key, raw, host, looked_up=self.looked_up)
            self._wrapped[key] = (raw, made)
        return self._wrapped[key][1]

    # -- forward ---------------------------------------------------------------------------------------------------------------

    def forward(self, ids: np.ndarray, cache: KVCache, tap: Tap = no_tap, commit: bool = True, prompt: bool = False,
                scales: np.ndarray | None = None, shown: MediaEmbeddings | None = None, turned: np.ndarray | None = None,
                looks: Sequence[ImageSpan] = (), wanted: int | None = None) -> np.ndarray:
        """Run `ids` int64 [T] after what is cached; returns the last hidden states on the host, float32 [T, D], before the final norm.

        Without `commit` the cache holds none of them until the caller says how many. `prompt`: see `KVCache.begin`. `scales`: LoRA scales
        of these tokens, float32 [1, adapters], or a row for each token if they are of several sequences; None for no adapter. `shown`: rows
        that replace some tokens' embeddings. `turned`: rotary positions [T] or [T, pairs], if not the cache's. `looks`: which tokens attend
        to which images, for cross attention. `wanted`: how many of the last tokens' states are needed, None for all; the result may then
        have fewer rows, as the last layers run for few tokens.
        """
        step, cache.ends = cache.begin(len(ids), prompt), attention_ends(self.config, cache, len(ids), shown)
        host = self.backends["cpu"]
        for backend in self.backends.values() if self.records.adapted.names else ():
            backend.adapt(scales)
        if not self.pager.resident:
            self.store.check_unchanged()
        if tap is no_tap and cache.probes is not None and cache.probes.begin(step.positions):
            tap = cache.probes.see
        # A pass of few tokens over weights that stay where they are does what the last one of as many did, until the list of blocks is
        # another. The first pass does not count: a layer does not know yet who follows.
        few, stay = len(ids) <= MAX_DECODE_TOKENS, self.pager.stays and not self._on_device
        self._given = vision_routing(self.config.mixture, ids, shown)
        plain = tap is no_tap and cache.ends is self._given is shown is turned is None and not looks
        self._shown, self._turned, self._seen = shown, turned, (looks, scales)
        apart = tap is not no_tap or looks or self.between or (shown is not None and shown.deep is not None)
        self._last = None if apart else kept_of(len(ids), wanted)
        if looks:
            self.pictures.begin(looks)
        same = step.blocks if few and stay and plain and len(self._wrapped) > len(self.devices) else None
        if tap is not no_tap:
            tap = _after_flush(host, tap)
        if same is not None:
            self._ids.setdefault(len(ids), np.zeros(len(ids), np.int64))[:] = ids
        with self._within_memory("the GPU ran out of memory during a pass"), host.collecting():
            with self.pager.lease("outer") as raw:
                outer = self._lease("outer", raw)
                listed = same is not None and outer.is_job and not self.config.streams
                x = None if listed else self._embed(ids, outer, step.positions, shown)
                self._given = self._beside(ids, x, outer, cache) or self._given
                if self.config.streams:
                    x = host.enter_streams(x, outer.enter, self.config.streams)
                    if not self.pager.stays:
                        host.flush()
            if same is not None and host.replay(same, len(ids), step.position):
                x = self._repeated[len(ids)]
            else:
                with host.recording(same, len(ids)):
                    x = self._layers(self._embed(self._ids[len(ids)], outer, step.positions) if listed else x, cache, tap, wanted)
                self._repeated[len(ids)] = x
        if commit:
            cache.commit()
        return x

    def _beside(self, ids: np.ndarray, x: object, outer: OuterWeights, cache: KVCache) -> Mapping[int, object]:
        """Per-layer inputs of the tokens beside the residual stream: input embeddings, routed experts, or n-gram rows."""
        config, host = self.config, self.backends["cpu"]
        if outer.ngrams:
            own = config.ngrams
            words = {layer: cache.layer(layer).words(ids, own.end) for layer in own.layers}
            return {layer: host.ngram_rows(own.numbers(layer, words[layer]), table, place)
                    for place, (layer, table) in enumerate(outer.ngrams.items())}
        if outer.picks:
            return host.picked_experts(ids, outer.picks, config.mixture.experts)
        if outer.inputs is None:
            return {}
        table, *made = outer.inputs
        known = ids if table is None else clip_to_table(ids, config.input_vocab)
        return dict(enumerate(host.layer_inputs(known, x, table, *made, config.input_multiplier)))

    def _embed(self, ids: np.ndarray, outer: OuterWeights, positions: np.ndarray, shown: MediaEmbeddings | None = None) -> np.ndarray:
        places, put = None if self.config.position_offset is None else positions + self.config.position_offset, shown and shown.put
        return self.backends["cpu"].embed(ids, outer.embed, self.config.embedding_multiplier, places, outer.positions, put)

    def _layers(self, x: object, cache: KVCache, tap: Tap, wanted: int | None = None) -> object:
        """All blocks, each on its backend: the host's x[T, D], or with several streams [T, S * D] -> x[T, D]."""
        here, host, positions = "cpu", self.backends["cpu"], cache.step.positions
        ops, copies = host, (least := self.copied_from) is not None and len(positions) >= least
        for layer, lives in enumerate(self.devices):
            if layer == self._alone and self._last is not None:
                x, places = last_of(x, self._last), positions if self._turned is None else self._turned
                if wanted == 0 and self.pager.resident and not copies:
                    break
                self._turned = last_of(places, self._last)
            if layer in self.between:
                host.kept(x, self.between.index(layer), len(self.between))
            device = "cuda" if copies else lives
            if device == "cuda" and not copies and tap is no_tap and self._repeats(cache, layer):
                here, ops, before = device, self.backends[device], ops.to_host(x)
                x = ops.repeat(before, cache.step.blocks, positions, lambda at, first=layer: self._run_on_gpu(at, cache, first))
                break
            if device != here:
                x, here, ops = self.backends[device].from_host(ops.to_host(x)), device, self.backends[device]
            if copies and lives == "cpu":
                with self.uploader.layer(layer) as w:
                    x = self._block(layer, ops, w, x, cache, tap)
            elif device == "cpu":
                if self.predictors is not None and len(positions) <= FEW:
                    self.pager.layers[layer].expect(self.predictors.layers[layer].active(host.to_host(x)))
                with self.pager.lease(layer) as raw:
                    x = self._block(layer, ops, self._lease(layer, raw), x, cache, tap)
                    if not self.pager.stays:  # its memory may go when the lease ends
                        host.flush()
            else:
                x = self._block(layer, ops, self._on_device[layer], x, cache, tap)
            x = x if self._shown is None else self._shown.deepened(ops, x, layer)
        x = x if here == "cpu" else host.from_host(ops.to_host(x))
        if not self.config.streams:
            return x
        with self.pager.lease("outer") as raw:
            outer = self._lease("outer", raw)
            x = host.gathered(x, outer.leaves) if outer.leaves else host.leave_streams(x, outer.leave, self.config.streams)
            if not self.pager.stays:
                host.flush()
        return x

    def _block(self, layer: int, ops: object, w: LayerWeights, x: object, cache: KVCache, tap: Tap) -> object:
        """One block on the backend of `ops`; if its keys and values are on the host and it is not, attention inputs are copied."""
        host, config = self.backends["cpu"], self.config
        at_pictures = layer in config.cross_layers
        kv = self._pictures_of(layer) if at_pictures else cache.layer(layer)
        if self._last is not None and self._narrows[layer] and not at_pictures:
            kv = for_last_tokens(kv, self._last)
        if ops is not host and not at_pictures and self.devices[config.kv_sources[layer] if config.kv_sources else layer] == "cpu":
            kv = HostCacheBridge(kv, ops, host)
        own = None if self._given is None else self._given.get(layer)
        own = last_of(own, self._last) if own is not None and self._last is not None and layer >= self._alone else own
        given = () if own is None else (own if ops is host or isinstance(own, tuple) else ops.from_host(own),)
        places = cache.step.positions if self._turned is None else self._turned
        return self.block(x, Layer(ops, w, kv, places, self.ropes[layer], config, layer, tap), *given)

    def _pictures_of(self, layer: int) -> CrossAttentionLayer:
        """The image rows that a cross-attention layer attends to in this pass."""
        looks, scales = self._seen
        return self.pictures.layer(layer, looks, scales) if looks else NO_IMAGES

    def _repeats(self, cache: KVCache, first: int) -> bool:
        """May the GPU replay, for the blocks from `first` on, what it recorded in the last pass? Windows, routing, packed pages and
        state slots are decided on the host."""
        few = len(cache.step.positions) <= MAX_DECODE_TOKENS and "cpu" not in self.devices[first:]
        few = few and self._given is self._turned is self._shown is None and not self._seen[0]
        alike = not any(self.config.windows) and not self.config.kv_sources and not cache.is_packed
        return few and self.config.mixture is None and self.config.state is None and alike

    def _run_on_gpu(self, x: object, cache: KVCache, first: int) -> object:
        """Run the blocks from `first` on, all of them on the GPU."""
        for layer in range(first, len(self.devices)):
            x = self._block(layer, self.backends["cuda"], self._on_device[layer], x, cache, no_tap)
        return x

    def logits(self, x: np.ndarray) -> np.ndarray:
        """Logits of hidden states `[T, D]` -> float32 `[T, V]`, a view of the workspace."""
        config, host = self.config, self.backends["cpu"]
        with self.outer() as outer:
            norm, before = outer.norm, outer.before
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
