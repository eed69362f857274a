"""Several engines on Ray Serve behind one server: a deployment each, asked by what they have room for and by shared prefixes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from mosaic.decoding.config import GenerationConfig, with_options
from mosaic.decoding.forecast import Forecast
from mosaic.errors import MissingExtra, MosaicError, UsageError
from mosaic.models import load
from mosaic.runtime.prefixes import UNIT
from mosaic.serving.app import create_app, name_of
from mosaic.serving.engine import EngineOptions
from mosaic.serving.messages import Ended, Stepped
from mosaic.serving.supervisor import AnswerLost, Busy, EngineFailed, Limits, Supervisor, TooLarge

try:
    import ray
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException
except ImportError as error:
    raise MissingExtra("ray", "serve-ray", "`mosaic serve --replicas`") from error

if TYPE_CHECKING:
    from collections.abc import Callable

    from ray.serve import Application
    from ray.serve.handle import DeploymentHandle

    from mosaic.serving.metrics import Metrics
    from mosaic.serving.supervisor import Heard

__all__ = ["Replicas", "build", "start_replicas"]

_MOST_ONGOING: Final = 100_000
"""Requests of a replica at once: its engine admits them, not Ray."""
_KNOWN_UNITS: Final = 1 << 16
_AGAIN_S: Final = 0.5
_PASSED_ON: Final = ("state", "failure", "longest", "restarts", "waiting", "step_s", "retry_s")
_FITS: Final = ("now", "later", "never")
_LOST: Final = (RayError, RayServeException)
_log = logging.getLogger(__name__)


class _Raised(NamedTuple):
    """An error that travels as a value."""

    kind: str
    message: str
    seconds: int

    def error(self) -> MosaicError:
        if self.kind == "Busy":
            return Busy(self.message, self.seconds)
        kinds: Sequence[type[MosaicError]] = (TooLarge, EngineFailed, AnswerLost)
        return {one.__name__: one for one in kinds}.get(self.kind, MosaicError)(self.message)


def _raised(error: MosaicError) -> _Raised:
    return _Raised(type(error).__name__, str(error), getattr(error, "seconds", 1))


class Engine:
    """A replica: an engine's process and its supervisor, which tell whoever listens what they do."""

    def __init__(self, options: EngineOptions, limits: Limits) -> None:
        self._listeners = list[asyncio.Queue[Stepped | Ended]]()
        self._supervisor = Supervisor(
            options, limits, self._tell, cast("Metrics", self)
        )  # which is told of what has ended
        self._started = False

    def _tell(self, message: Stepped | Ended) -> None:
        for listener in self._listeners:
            listener.put_nowait(message)

    ended = _tell

    def _start(self) -> Supervisor:
        if not self._started:
            self._started = True
            self._supervisor.start()
        return self._supervisor

    async def tells(self) -> AsyncIterator[tuple[dict[str, Any], Stepped | Ended | None]]:
        """Yield how the engine is, with each message that it sends, at once and at least each half second."""
        supervisor, listener = self._start(), asyncio.Queue[Stepped | Ended]()
        self._listeners.append(listener)
        try:
            message: Stepped | Ended | None = None
            while True:
                yield {name: getattr(supervisor, name) for name in _PASSED_ON}, message
                try:
                    message = await asyncio.wait_for(listener.get(), _AGAIN_S)
                except TimeoutError:
                    message = None
        finally:
            self._listeners.remove(listener)

    async def answer(
        self, prompt: Sequence[int], config: GenerationConfig, asked: dict[str, Any]
    ) -> AsyncIterator[Any]:
        """Yield what the supervisor tells, and an error as a value."""
        supervisor = self._start()
        heard: asyncio.Queue[Heard | Exception] = asyncio.Queue()
        try:
            await supervisor.ready()
            cancel = supervisor.ask(prompt, config, heard.put_nowait, **asked)
        except MosaicError as error:
            yield _raised(error)
            return
        try:
            one: Any = None
            while not isinstance(one, Ended | _Raised):
                one = await heard.get()
                one = _raised(one) if isinstance(one, MosaicError) else one
                yield one
        finally:
            cancel()

    async def forecast(self, prompt: Sequence[int], config: GenerationConfig) -> Forecast | _Raised:
        """Return that of the supervisor."""
        try:
            return await self._start().forecast(prompt, config)
        except MosaicError as error:
            return _raised(error)

    async def plan(self) -> Mapping[str, Any] | _Raised:
        """Return that of the supervisor."""
        try:
            return await self._start().plan()
        except MosaicError as error:
            return _raised(error)

    async def watch(self) -> None:
        """Let the engine send pictures for a while."""
        self._start().watch()


@dataclass(slots=True, eq=False)
class _Replica:
    """A replica as it said last that it is, requests that were sent to it and have not ended, and units of prompts that it had."""

    handle: DeploymentHandle
    said: dict[str, Any]
    open: int
    units: OrderedDict[int, None]

    def shares(self, units: Sequence[int]) -> int:
        """First units of a prompt whose keys it may have."""
        return next((count for count, unit in enumerate(units) if unit not in self.units), len(units))

    def keep(self, units: Sequence[int]) -> None:
        for unit in units:
            self.units[unit] = None
            self.units.move_to_end(unit)
        while len(self.units) > _KNOWN_UNITS:
            self.units.popitem(last=False)


class Replicas:
    """Stands for a `Supervisor`: a request goes to a replica where nobody waits, to the one that has most of its prefix, to the
    one with the fewest requests, in this order.

    A replica that is lost loses what it had begun to send; other requests are asked of another one. Ray starts it again.

    Parameters
    ----------
    handles
        Of the deployments, each with one replica.
    limits, stepped, metrics
        As a supervisor's.
    """

    pid = None

    def __init__(
        self, handles: Sequence[DeploymentHandle], limits: Limits, stepped: Callable[[Stepped], object], metrics: Metrics
    ) -> None:  # fmt: skip
        self._limits, self._stepped, self._metrics = limits, stepped, metrics
        nothing = {
            "state": "starting",
            "failure": "",
            "longest": 0,
            "restarts": 0,
            "waiting": 0,
            "step_s": 0.0,
            "retry_s": 1,
        }
        self._replicas = [_Replica(handle, dict(nothing), 0, OrderedDict()) for handle in handles]
        self._lost = 0
        self._listening = list[asyncio.Task[None]]()
        self._answering = set[Any]()
        self._closed = self._ends = False
        self._changed = asyncio.Event()

    def _all(self, name: str) -> list[Any]:
        return [replica.said[name] for replica in self._replicas]

    @property
    def started(self) -> bool:
        """Whether `start` was called."""
        return bool(self._listening)

    @property
    def state(self) -> str:
        """Ready if one replica is, failed if all are."""
        states = self._all("state")
        if self._closed:
            return "closed"
        return "ready" if "ready" in states else "failed" if {*states} == {"failed"} else "starting"

    @property
    def failure(self) -> str:
        """Why one has failed."""
        return next(filter(None, self._all("failure")), "")

    @property
    def longest(self) -> int:
        """The most positions of a request in any of them."""
        return int(max(self._all("longest")))

    @property
    def waiting(self) -> int:
        """Prompts that wait, in all of them."""
        return int(sum(self._all("waiting")))

    @property
    def restarts(self) -> int:
        """How often engines and replicas have been started again."""
        return self._lost + int(sum(self._all("restarts")))

    @property
    def step_s(self) -> float:
        """Seconds of a step, of the slowest."""
        return float(max(self._all("step_s")))

    def start(self) -> None:
        """Listen to all replicas."""
        self._listening = [asyncio.create_task(self._listen(replica)) for replica in self._replicas]

    async def ready(self) -> None:
        """Wait until one replica is; as a supervisor's."""
        while self.state == "starting":
            self._changed.clear()
            await self._changed.wait()
        if self.state != "ready":
            raise EngineFailed(self.failure or "the server is closed")

    async def close(self) -> None:
        """Listen no more; whoever has started Ray ends the replicas."""
        self._closed = True
        self._changed.set()
        for task in self._listening:
            task.cancel()
        await asyncio.gather(*self._listening, return_exceptions=True)

    def end(self) -> None:
        """Answer whoever still listens that the server ends."""
        self._ends = True
        for response in [*self._answering]:
            response.cancel()

    def watch(self) -> None:
        """Let all send pictures for a while."""
        for replica in self._replicas:
            replica.handle.watch.remote()

    async def _listen(self, replica: _Replica) -> None:
        """Hear a replica, for ever."""
        while True:
            response = replica.handle.options(stream=True).tells.remote()
            try:
                async for said, message in response:
                    if said["restarts"] > replica.said["restarts"]:
                        replica.units.clear()
                    replica.said = said
                    self._changed.set()
                    if isinstance(message, Stepped):
                        self._stepped(self._of_all(message))
                    elif message is not None:
                        self._metrics.ended(message)
            except _LOST as error:
                _log.error("a replica is lost: %s", str(error).splitlines()[0])
                self._lost += 1
                replica.said |= {"state": "starting", "waiting": 0}
                replica.units.clear()
            finally:
                response.cancel()
            await asyncio.sleep(_AGAIN_S)

    def _of_all(self, step: Stepped) -> Stepped:
        """What one replica tells, with the requests of all."""
        return replace(
            step, waiting=self.waiting, running=max(sum(one.open for one in self._replicas) - self.waiting, 0)
        )

    def _chosen(self, units: Sequence[int], without: _Replica | None) -> _Replica:
        all_ready = [one for one in self._replicas if one.said["state"] == "ready"]
        ready = [one for one in all_ready if one is not without] or all_ready
        if not ready:
            raise EngineFailed("no engine is ready; ask again.")
        least = min(one.said["waiting"] for one in ready)
        return min(
            (one for one in ready if one.said["waiting"] == least),
            key=lambda one: (-one.shares(units) if not least else 0, one.open),
        )

    def ask(
        self, prompt: Sequence[int], config: GenerationConfig, heard: Callable[[Heard | Exception], object], **asked: Any
    ) -> Callable[[], object]:  # fmt: skip
        """Ask a replica; as a supervisor's."""
        if self.waiting >= self._limits.max_waiting:
            raise Busy(
                f"{self.waiting:,} requests wait, which is as many as may; ask again later.", min(self._all("retry_s"))
            )
        return asyncio.create_task(self._follow(prompt, config, heard, **asked)).cancel

    async def _follow(
        self, prompt: Sequence[int], config: GenerationConfig, heard: Callable[[Heard | Exception], object], **asked: Any
    ) -> None:  # fmt: skip
        try:
            await self._hear(prompt, config, heard, **asked)
        except Exception as error:
            heard(error)

    async def _hear(
        self, prompt: Sequence[int], config: GenerationConfig, heard: Callable[[Heard | Exception], object], *, name: str = "",
        **asked: Any,
    ) -> None:  # fmt: skip
        """Hand on what a replica tells, or another one if it is lost."""
        units = _units(prompt)
        lost: _Replica | None = None
        while True:
            replica, told = self._chosen(units, lost), False
            replica.keep(units)
            replica.open += 1
            response = replica.handle.options(stream=True).answer.remote(prompt, config, {**asked, "name": name})
            self._answering.add(response)
            try:
                async for one in response:
                    if isinstance(one, _Raised):
                        raise one.error()
                    told = True
                    heard(one)
                    if isinstance(one, Ended):
                        return
                raise EngineFailed("the engine has ended before the answer; ask again.")
            except _LOST as error:
                if self._ends:
                    raise EngineFailed("the server ends; ask again, it may be another one.") from None
                _log.error("request %s: its replica is lost: %s", name, str(error).splitlines()[0])
                if told or lost is not None:
                    failed = EngineFailed if lost is not None else AnswerLost
                    raise failed("the engine has failed while it worked on this request; ask again.") from None
                lost = replica
                await self.ready()
            finally:
                self._answering.discard(response)
                replica.open -= 1
                response.cancel()

    async def forecast(self, prompt: Sequence[int], config: GenerationConfig) -> Forecast:
        """Return that of the replica which has room first; as a supervisor's."""
        await self.ready()
        ready = [one for one in self._replicas if one.said["state"] == "ready"]
        found = await asyncio.gather(
            *(one.handle.forecast.remote(prompt, config) for one in ready), return_exceptions=True
        )
        told = [one for one in found if isinstance(one, Forecast)]
        if not told:
            raise next(
                (one.error() for one in found if isinstance(one, _Raised)),
                EngineFailed("the engine has failed; ask again."),
            )
        return min(told, key=lambda one: (_FITS.index(one.fits), one.steps or 0))

    async def plan(self) -> Mapping[str, Any]:
        """Return that of one replica; as a supervisor's."""
        await self.ready()
        ready = next(one for one in self._replicas if one.said["state"] == "ready")
        try:
            found: Mapping[str, Any] | _Raised = await ready.handle.plan.remote()
        except _LOST:
            raise EngineFailed("the engine has failed; ask again.") from None
        if isinstance(found, _Raised):
            raise found.error()
        return found


def _units(prompt: Sequence[int]) -> list[int]:
    """A hash for each whole unit of a prompt, of it and all before it."""
    found, chained = list[int](), 0
    for start in range(0, len(prompt) - UNIT + 1, UNIT):
        chained = hash((chained, *prompt[start : start + UNIT]))
        found.append(chained)
    return found


def _deployments(options: EngineOptions, limits: Limits, replicas: int, gpus: int) -> list[Application]:
    """An application of each replica, which takes so many GPUs."""
    made = serve.deployment(Engine).options(
        max_ongoing_requests=_MOST_ONGOING, ray_actor_options={"num_gpus": gpus, "num_cpus": 0}, health_check_period_s=2
    )
    return [made.options(name=f"engine-{place}").bind(options, limits) for place in range(replicas)]


@contextlib.contextmanager
def start_replicas(options: EngineOptions, limits: Limits, replicas: int, gpus: int) -> Any:
    """Start replicas on this machine, or on the cluster of RAY_ADDRESS; yield what makes `Replicas`, for `create_app`."""
    mine = not ray.is_initialized()
    if mine:
        ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        serve.start(http_options={"location": "NoServer"})
        handles = [
            serve.run(made, name=f"mosaic-{place}", route_prefix=None, logging_config={"log_level": "WARNING"})
            for place, made in enumerate(_deployments(options, limits, replicas, gpus))
        ]
        yield lambda stepped, metrics: Replicas(handles, limits, stepped, metrics)
    finally:
        if mine:  # all ends with it; a service manager's signal may have reached Ray's processes, too
            ray.shutdown()
        else:
            for place in range(replicas):
                serve.delete(f"mosaic-{place}")


def build(args: dict[str, Any]) -> Application:
    """Return the application of a deployment file: `import_path: mosaic.serving.replicas:build`.

    Parameters
    ----------
    args
        `model`, and as they are wanted: `replicas` (1), `gpus` of each (1; 0 with device cpu), `name`, `compile` (options of
        `mosaic.compile`), `generation` (options of requests that leave them out), `max_num_seqs`, `max_waiting`, `warm`,
        `api_keys`, `strict`, `policies`.

    Raises
    ------
    UsageError
        If there is no model, or an option is unknown.
    """
    given = dict(args)
    try:
        name = given.pop("model")
    except KeyError:
        raise UsageError("args: 'model' is missing: a preset or a checkpoint directory.") from None
    compiled = dict(given.pop("compile", {}))
    replicas = int(given.pop("replicas", 1))
    gpus = int(given.pop("gpus", 0 if compiled.get("device", "cpu") == "cpu" else 1))
    base = with_options(GenerationConfig(), dict(given.pop("generation", {})))
    options = EngineOptions(
        model=name,
        compile=compiled,
        base=base,
        **{key: given.pop(key) for key in ("max_num_seqs", "warm") if key in given},
    )
    limits = Limits(**{key: given.pop(key) for key in ("max_waiting",) if key in given})
    served, keys = given.pop("name", None), tuple(given.pop("api_keys", ()))
    strict, policies = bool(given.pop("strict", False)), given.pop("policies", None)
    if given:
        raise UsageError(f"args: '{min(given)}' is no option of a deployment.")

    def asgi() -> Any:
        described, where = load(name), serve.get_replica_context().app_name
        handles = [serve.get_deployment_handle(f"engine-{place}", where) for place in range(replicas)]
        return create_app(
            described, served or name_of(name, described), options, limits, keys=keys, strict=strict, policies=policies,
            engine=lambda stepped, metrics: Replicas(handles, limits, stepped, metrics),
        )  # fmt: skip

    ingress = serve.deployment(serve.ingress(asgi)()).options(name="server", max_ongoing_requests=_MOST_ONGOING)
    return ingress.bind(*_deployments(options, limits, replicas, gpus))
