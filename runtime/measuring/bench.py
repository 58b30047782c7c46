"""Tokens per second of a model: prompt processing (pp) and text generation (tg), at a depth, as llama-bench defines them.

Rows begin with llama-bench's field names, in its order, as far as they apply; ours follow: bytes read per forward pass, the fraction of the
machine's read bandwidth, which is measured in the same run over memory as large as the weights (at most 1 GiB; over the weights themselves
if --ram has no room beside them), and the speed that `effllm plan` predicts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from statistics import fmean, median, stdev

import numpy as np

from ... import UsageError, __version__
from ...kernels.cpu.memory_bandwidth import BLOCK, read_bandwidth
from ...kernels.layout import PAGE
from ...offload import hardware, predict
from ...offload.gpu import gpus
from ...offload.memory import anonymous
from ...quant.spec import QuantSpec
from ..engine import Engine
from ..events import Notice, Progress
from ..planning import forecast, roofs
from ..planning.forecast_outcome import MIN_NBYTES, describe_cpu_use
from ..planning.plan_request import LOGIT_ROWS
from ..prepare import EngineOptions, Prepared, prepare_with
from ..sampler import Sampler, SamplerSettings
from ..tensors import parameters
from .synthetic import SyntheticStore, synthetic_config

ROOF_NBYTES = 1 << 30


@dataclass(frozen=True)
class BenchTest:
    """One measurement: either a prompt is processed or tokens are generated."""

    prompt: int  # tokens of the prompt, 0 for generation
    gen: int  # tokens to generate, 0 for a prompt
    depth: int  # tokens in the cache before


@dataclass(frozen=True)
class BenchOptions:
    """What to measure. An engine with speculation generates its greedy text, any other runs random tokens."""

    prompt: tuple[int, ...] = (512,)  # a test of each prompt length at each depth; 0 is no test
    gen: tuple[int, ...] = (64,)  # a test of each generation length at each depth; 0 is no test
    depth: tuple[int, ...] = (0,)
    repetitions: int = 3
    columns: int = 1  # tokens per forward pass of generation

    def __post_init__(self) -> None:
        for name, values, minimum in (("-p", self.prompt, 0), ("-n", self.gen, 0), ("-d", self.depth, 0), ("-r", [self.repetitions], 1),
                                   ("--columns", [self.columns], 1)):
            for value in values:
                if value < minimum:
                    raise UsageError(f"{name} {value} is too small", f"at least {minimum}")
        if self.columns > LOGIT_ROWS:
            raise UsageError(f"--columns {self.columns} is too large", f"at most {LOGIT_ROWS}")
        if not self.tests:
            raise UsageError("nothing to measure", "give -p or -n")

    @property
    def tests(self) -> list[BenchTest]:
        """The tests, in order."""
        return [BenchTest(prompt, gen, depth) for depth in self.depth
                for prompt, gen in [*((tokens, 0) for tokens in self.prompt), *((0, tokens) for tokens in self.gen)] if prompt or gen]

    @property
    def ctx(self) -> int:
        """The context that the tests need."""
        return 1 + max(max(test.depth + test.prompt, max(test.depth, 1) + test.gen * self.columns) for test in self.tests)


@dataclass(frozen=True)
class BenchSamples:
    """The repetitions of one test."""

    test: BenchTest
    samples: list[float]  # seconds
    start_time: str  # UTC
    peak_rss: int  # bytes, by the end of the test
    pass_nbytes: int  # weights and cache read by the last pass
    disk_nbytes: int  # per repetition
    disk_wait_s: float  # per repetition
    passes: int  # forward passes of generation per repetition


@dataclass(frozen=True)
class BenchRow:
    """Result of one test. `_ts` are tokens per second, `_ns` nanoseconds, bandwidths bytes per second."""

    build_commit: str
    build_number: int
    cpu_info: str
    gpu_info: str
    backends: str
    model_filename: str
    model_type: str
    model_size: int
    model_n_params: int
    n_batch: int  # maximum tokens per pass
    n_ubatch: int
    n_threads: int
    type_k: str
    type_v: str
    n_gpu_layers: int
    use_mmap: bool
    n_prompt: int
    n_gen: int
    n_depth: int
    test_time: str  # UTC start
    avg_ns: int
    stddev_ns: int
    avg_ts: float
    stddev_ts: float
    samples_ns: tuple[int, ...]
    samples_ts: tuple[float, ...]
    median_ts: float
    columns: int
    bytes_per_pass: int
    read_bandwidth: float
    roof_bandwidth: float
    roof_fraction: float
    peak_rss_bytes: int
    disk_bytes_read: int  # per repetition
    disk_wait_s: float  # per repetition
    predicted_ts: float | None  # None for a short prompt, or if this machine was not measured
    tokens_per_pass: float  # of generation, the mean if tokens were drafted; 0 for a prompt

    @property
    def test(self) -> str:
        return test_name(BenchTest(self.n_prompt, self.n_gen, self.n_depth))

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "test": self.test}


def prepare_synthetic(shape: str, options: EngineOptions, spec: str | None = None) -> Prepared:
    """Like `prepare.prepare`, for random weights of a named shape: bf16, or a format such as 4bit."""
    config = synthetic_config(shape)
    store = SyntheticStore(config, None if spec is None else QuantSpec.parse(spec))
    return prepare_with(None, config, store, options, store.container)


def bench(engine: Engine, options: BenchOptions, name: str) -> Iterator[Progress | Notice | BenchRow]:
    """Run the tests, each after one warm-up. Yields Progress per repetition, then a BenchRow per test.

    Before the rows comes a Notice if other processes used the cores, and one if this machine was not measured, so that nothing is
    predicted.
    """
    if options.ctx > engine.n_ctx:
        raise UsageError(f"the measurement needs a context of {options.ctx}, the engine has {engine.n_ctx}",
                         f"-c {options.ctx}, or fewer tokens: -p, -n, -d")
    if engine.speculation is not None and options.columns > 1:
        raise UsageError("--columns runs tokens side by side that speculation would choose", "drop --columns, or --spec and --draft")
    rng = np.random.default_rng(0)
    ids = rng.integers(0, engine.config.vocab_size, options.ctx).tolist()
    results, cpu_time_before = list[BenchSamples](), hardware.cpu_time()
    for test in options.tests:
        samples, start_time = [], datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        _run_test(engine, ids, replace(test, prompt=min(test.prompt, PAGE), gen=min(test.gen, 2)), options.columns)
        disk_nbytes_before, disk_wait_before, passes_before = engine.disk_nbytes, engine.disk_wait_s, _num_speculative_passes(engine)
        for done in range(options.repetitions):
            yield Progress(f"measuring {test_name(test)}", done, options.repetitions, "runs")
            samples.append(_run_test(engine, ids, test, options.columns))
        disk_nbytes = (engine.disk_nbytes - disk_nbytes_before) // options.repetitions
        disk_wait_s = (engine.disk_wait_s - disk_wait_before) / options.repetitions
        pass_nbytes = engine.model.bytes_per_pass + engine.prepared.adapters.nbytes_of(engine.adapter_scales) + engine.cache.seen_nbytes
        passes = (_num_speculative_passes(engine) - passes_before) // options.repetitions or test.gen
        results.append(BenchSamples(test, samples, start_time, hardware.peak_rss(), pass_nbytes, disk_nbytes, disk_wait_s, passes))
    cores = hardware.cpu_time().since(cpu_time_before)
    if cores.others_share > roofs.MAX_OTHERS_SHARE:
        yield Notice(f"{describe_cpu_use(cores)}: a machine that does nothing else is faster")
    roof = _roof_bandwidth(engine)  # last: its buffer must not count as the model's memory
    if _is_predictable(engine, options.columns) and roofs.known(forecast.wanted(engine.prepared, engine.model.tensors)).rates is None:
        yield Notice(f"no prediction: {forecast.no_roofs(engine.options)}")
    for result in results:
        yield _row(engine, options, name, result, roof)


def test_name(test: BenchTest) -> str:
    """llama-bench's name of a test: pp512, tg128 @ d1024."""
    name = f"pp{test.prompt}" if test.prompt else f"tg{test.gen}"
    return name + (f" @ d{test.depth}" if test.depth else "")


def _num_speculative_passes(engine: Engine) -> int:
    """Speculative passes so far."""
    return engine.speculation.counts.passes if engine.speculation else 0


def _run_test(engine: Engine, ids: list[int], test: BenchTest, columns: int) -> float:
    """Run a test once; returns its seconds, without the prefill of its depth."""
    engine.reset()
    generates = engine.speculation is not None and test.gen > 0
    if test.depth or generates:
        for _ in engine.prefill(ids[: max(test.depth, 1)]):
            continue
    started = time.perf_counter()
    if generates:
        greedy = Sampler(SamplerSettings(temperature=0), engine.config.vocab_size)
        for _ in engine.generate(greedy, test.gen + 1, frozenset()):  # the first token needs no pass after the prefill
            continue
        return time.perf_counter() - started
    if test.prompt:
        engine.set_tokens(engine.tokens)  # so that the prefill runs exactly `prompt` tokens, however few
        for _ in engine.prefill(ids[: test.depth + test.prompt]):
            continue
    for step in range(test.gen):
        at = test.depth + step * columns
        engine.forward_logits(ids[at : at + columns])
    return time.perf_counter() - started


def _row(engine: Engine, options: BenchOptions, name: str, result: BenchSamples, roof: float) -> BenchRow:
    test, samples, devices = result.test, result.samples, engine.placement.devices
    prompt, gen = test.prompt, test.gen
    tokens = prompt or gen * options.columns
    rates = [tokens / seconds for seconds in samples]
    nanoseconds = [round(seconds * 1e9) for seconds in samples]
    bandwidth = result.pass_nbytes * result.passes / median(samples) if gen else 0.0
    major, minor, patch = (int(part) for part in __version__.split(".")[:3])
    folder = engine.prepared.folder
    return BenchRow(
        build_commit=f"effllm-{__version__}", build_number=10_000 * major + 100 * minor + patch, cpu_info=hardware.cpu_name(),
        gpu_info=", ".join(card.name for card in gpus()) if "cuda" in devices else "", backends="+".join(dict.fromkeys(devices)),
        model_filename=str(folder) if folder else name, model_type=name, model_size=engine.model.nbytes,
        model_n_params=parameters(engine.model.tensors), n_batch=engine.prepared.shape.chunk, n_ubatch=engine.prepared.shape.chunk,
        n_threads=engine.backends["cpu"].pool.workers, type_k=engine.options.kv, type_v=engine.options.kv,
        n_gpu_layers=devices.count("cuda"), use_mmap=engine.options.load == "mmap", n_prompt=prompt, n_gen=gen, n_depth=test.depth,
        test_time=result.start_time, avg_ns=round(fmean(nanoseconds)), stddev_ns=round(_stdev(nanoseconds)), avg_ts=fmean(rates),
        stddev_ts=_stdev(rates), samples_ns=tuple(nanoseconds),
        samples_ts=tuple(rates), median_ts=median(rates), columns=options.columns if gen else 1, bytes_per_pass=result.pass_nbytes,
        read_bandwidth=bandwidth, roof_bandwidth=roof, roof_fraction=bandwidth / roof, peak_rss_bytes=result.peak_rss,
        disk_bytes_read=result.disk_nbytes, disk_wait_s=result.disk_wait_s, predicted_ts=_predicted_rate(engine, test, options.columns),
        tokens_per_pass=tokens / result.passes if gen else 0.0)


def _predicted_rate(engine: Engine, test: BenchTest, columns: int) -> float | None:
    """The plan's prediction for a test on this machine, None for several columns, sparse KV reads and short prompts."""
    rates = roofs.known(forecast.wanted(engine.prepared, engine.model.tensors)).rates
    is_unpredictable = engine.cache.pool.picks if test.gen else not predict.is_predictable(test.prompt)
    if rates is None or not _is_predictable(engine, columns) or is_unpredictable:
        return None
    work = forecast.work(engine.prepared, engine.model.tensors)
    if test.gen:
        decoding = predict.decode(work, rates, test.depth + test.gen // 2)
        return decoding and decoding.tokens_per_s
    prefill, depth_prefill = predict.prompt(work, rates, test.depth + test.prompt), predict.prompt(work, rates, test.depth)
    if not (prefill and depth_prefill):
        return None
    return test.prompt / (prefill.seconds - (depth_prefill.seconds if test.depth else 0))


def _is_predictable(engine: Engine, columns: int) -> bool:
    return "cuda" not in engine.placement.devices and columns == 1


def _stdev(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def _roof_bandwidth(engine: Engine) -> float:
    """Read bandwidth with the engine's threads, bytes per second, over a buffer as large as the weights (64 MiB to ROOF_NBYTES). If the
    memory budget has no room for it, over the weights in memory; if those are few, over a buffer that fits."""
    pool, nbytes = engine.backends["cpu"].pool, min(ROOF_NBYTES, max(64 << 20, engine.model.nbytes))
    available_nbytes = engine.placement.budget.ram - hardware.rss() - (8 << 20)
    if nbytes > available_nbytes:
        weights = [array[: array.nbytes // BLOCK * BLOCK] for array in engine.model.pager.resident_arrays() if array.nbytes >= BLOCK]
        if sum(array.nbytes for array in weights) >= MIN_NBYTES:
            return read_bandwidth(pool, *weights)
        nbytes = max(4 << 20, available_nbytes)
    memory = anonymous(nbytes)
    memory.view(np.uint64)[:] = 0x0101010101010101  # untouched memory is one shared page of zeros
    return read_bandwidth(pool, memory)


def context_for(options: EngineOptions, bench_options: BenchOptions) -> EngineOptions:
    """Engine options with the context that the tests need, unless one was requested, and without drafts unless requested: by definition
    a test runs random tokens, which never repeat."""
    spec = "off" if options.spec == "auto" and options.draft is None else options.spec
    return replace(options, ctx=options.ctx or max(PAGE, bench_options.ctx), spec=spec)
