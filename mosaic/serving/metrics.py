"""`/metrics`: vLLM's names where the meaning is the same, and memory by pool, planned and committed, under `mosaic:`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from mosaic.errors import MissingExtra

try:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
except ImportError as error:
    raise MissingExtra("prometheus-client", "serve", "`mosaic serve`") from error

if TYPE_CHECKING:
    from mosaic.serving.messages import Ended, Stepped

__all__ = ["Metrics"]

_TOKENS: Final = (1, 4, 16, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """What a server counts."""

    def __init__(self, model: str) -> None:
        self._registry = CollectorRegistry()
        self._model = model
        labels = ("model_name",)

        def counter(name: str, text: str, *more: str) -> Counter:
            made = Counter(name, text, (*labels, *more), registry=self._registry)
            if not more:
                made.labels(model)  # shown as 0 from the start, where vLLM's bench looks for it
            return made

        def gauge(name: str, text: str, *more: str) -> Gauge:
            return Gauge(name, text, (*labels, *more), registry=self._registry)

        def histogram(name: str, text: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
            return Histogram(name, text, labels, registry=self._registry, buckets=buckets)

        self._running = gauge("vllm:num_requests_running", "Requests that are live.")
        self._waiting = gauge("vllm:num_requests_waiting", "Prompts that wait for admission.")
        self._prompt_tokens = counter("vllm:prompt_tokens", "Tokens of prompts that were served.")
        self._tokens = counter("vllm:generation_tokens", "Tokens of answers.")
        self._ended = counter("vllm:request_success", "Answers, by what ended them.", "finished_reason")
        self._refusals = counter("vllm:admission_rejections", "Requests that were refused.", "reason")
        self._steps = counter("vllm:diffusion_num_denoising_steps", "Steps of answers, commits included.")
        self._committed = counter("vllm:diffusion_num_committed_tokens", "Tokens that became final.")
        self._positions = counter("vllm:diffusion_num_canvas_positions", "Positions of blocks, summed over steps.")
        self._step_seconds = counter("mosaic:step_seconds", "Seconds in which the engine was in a step.")
        self._first = histogram("vllm:time_to_first_token_seconds", "From the request to its first final tokens.")
        self._whole = histogram("vllm:e2e_request_latency_seconds", "From the request to its end.")
        self._tpot = histogram(
            "vllm:request_time_per_output_token_seconds", "Of a request, behind its first final tokens."
        )
        self._lengths = histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._answers = histogram("vllm:request_generation_tokens", "Tokens of a request's answers.", _TOKENS)
        self._looked_up = counter(
            "vllm:prefix_cache_queries", "Tokens of prompts that were looked for among shared prefixes."
        )
        self._found = counter("vllm:prefix_cache_hits", "Of these, tokens whose keys were there.")
        self._keys = gauge(
            "vllm:kv_cache_usage_perc", "Rows of keys in use, of those that the plan in force has; 1 is all."
        )
        self._memory = gauge("mosaic:memory_bytes", "Bytes by pool.", "pool", "kind")
        self._plan = gauge("mosaic:plan_bytes", "Bytes of the plan in force, by component.", "component")

    def stepped(self, step: Stepped) -> None:
        """Note the state of the engine after a step."""
        self._running.labels(self._model).set(step.running)
        self._waiting.labels(self._model).set(step.waiting)
        self._step_seconds.labels(self._model).inc(step.seconds)
        self._committed.labels(self._model).inc(step.tokens)
        for pool, sizes in step.memory.items():
            for kind, size in zip(("planned", "committed"), sizes, strict=True):
                self._memory.labels(self._model, pool, kind).set(size)
        if step.components:
            self._keys.labels(self._model).set(step.keys_used)
            self._plan.clear()
            for component, size in step.components.items():
                self._plan.labels(self._model, component).set(size)

    def began(self, seconds: float) -> None:
        """Note the first tokens of a request, so long after it came."""
        self._first.labels(self._model).observe(seconds)

    def ended(self, ended: Ended) -> None:
        """Note that the engine is done with a prompt, whether anybody waits for its answers or not; of none that never began."""
        if ended.prompt_tokens:
            self._prompt_tokens.labels(self._model).inc(ended.prompt_tokens)
            self._lengths.labels(self._model).observe(ended.prompt_tokens)
        self._looked_up.labels(self._model).inc(ended.prompt_tokens)
        self._found.labels(self._model).inc(ended.cached_tokens)
        self._steps.labels(self._model).inc(sum(ended.steps))
        self._positions.labels(self._model).inc(ended.positions)

    def answered(self, seconds: float, first: float, tokens: int, reasons: list[str]) -> None:
        """Note the end of a request, and when it had its first tokens; tokens of its answers in all, and what ended each."""
        self._whole.labels(self._model).observe(seconds)
        self._answers.labels(self._model).observe(tokens)
        if tokens > 1:
            self._tpot.labels(self._model).observe((seconds - first) / (tokens - 1))
        self._tokens.labels(self._model).inc(tokens)
        for reason in reasons:
            self._ended.labels(self._model, reason).inc()

    def refused(self, reason: str) -> None:
        """Note a refusal."""
        self._refusals.labels(self._model, reason).inc()

    def text(self) -> bytes:
        """Return all in Prometheus' text format."""
        return generate_latest(self._registry)
