"""FastAPI application of the API process."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from fastapi import Depends, FastAPI
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

import app.api.health
import app.api_keys.endpoints
import app.api_keys.sessions
import app.audit.endpoints
import app.backends.endpoints
import app.datasets.endpoints
import app.datasets.service
import app.experiments.endpoints
import app.models.endpoints
import app.openai.chat
import app.openai.files
import app.openai.jobs.endpoints
import app.openai.jobs.graders
import app.openai.models
import app.openai.webhooks
import app.prometheus.endpoints
import app.runs.endpoints
import app.runs.events.endpoints
import app.runs.events.history
import app.runs.queue.pause.endpoints
import app.runs.reading.logs.endpoints
import app.runs.reading.metrics.curves
import app.runs.reading.metrics.endpoints
import app.runs.reading.postmortem.endpoints
import app.runs.retention
import app.runs.state.actions.endpoints
import app.runs.state.artifacts.endpoints
import app.runs.state.checkpoints.endpoints
import app.secrets.endpoints
import app.usage.endpoints
import app.web.endpoints
import app.webhooks.endpoints
import app.workers.endpoints
from anneal.contracts.backends import BACKEND_RULES, WORKER_BACKENDS
from app.api import docs_page, errors, openapi
from app.api.dependencies import refuse_unknown_parameters
from app.api.middleware.body_limits import BodyLimitMiddleware
from app.api.middleware.disk_guard import DiskGuardMiddleware
from app.api.middleware.host_guard import HostGuardMiddleware
from app.api.middleware.request_ids import RequestIdMiddleware
from app.api.middleware.request_metrics import RequestMetrics, RequestMetricsMiddleware
from app.api.middleware.security_headers import SecurityHeadersMiddleware
from app.api.open_responses import DOWNLOADS_PER_KEY, OpenDownloads
from app.api_keys.middleware import AuthenticationMiddleware
from app.api_keys.verifier import KeyVerifier
from app.audit.middleware import AuditMiddleware
from app.backends.celery import CeleryBackend
from app.backends.ray import RayBackend
from app.backends.ray_jobs import RayJobs
from app.config import Settings, get_settings
from app.infra.broker import Broker
from app.infra.db import async_engine, session_maker
from app.infra.files.disk_space import DatabaseReserve
from app.infra.logs.tracing import Tracing
from app.infra.process.memory import return_large_blocks
from app.infra.server_urls import resolve_urls
from app.infra.storage import Storage
from app.openai.questions import Questions
from app.prometheus.collector import Metrics
from app.prometheus.snapshot import Snapshots
from app.runs.creating.estimates.service import EstimateTurns
from app.runs.events.responses import OpenStreams
from app.runs.events.stream import Streams
from app.runs.queue.dispatcher import Dispatcher
from app.runs.queue.eta import EtaService
from app.webhooks.sender import WebhookSender

if TYPE_CHECKING:
    from app.openai.external_engine import ExternalEngine

DESCRIPTION = "Fine-tune language models on your own machines: durable runs, live event streams, exact resume."


class Anneal(FastAPI):
    """FastAPI application whose OpenAPI document describes errors and keys once for every endpoint."""

    def openapi(self) -> dict[str, Any]:
        return openapi.openapi_document(self)


def create_app(settings: Settings | None = None) -> FastAPI:
    """Create the application; settings default to the environment, and URLs to the embedded servers."""
    settings = resolve_urls(settings or get_settings())
    requests = RequestMetrics()
    tracing = Tracing(settings.otlp_endpoint, "anneal-api")
    api = Anneal(
        title="Anneal",
        version=version("anneal"),
        description=DESCRIPTION,
        lifespan=_lifespan,
        # FastAPI's pages load scripts from another host, so they do not work offline.
        docs_url=None,
        redoc_url=None,
        # A redirect to the path with a slash would send the key a second time, possibly to another host.
        redirect_slashes=False,
        # From the outside in: access log and request id, then authentication, then checks of the request.
        middleware=[
            *_tracing_middleware(tracing),
            Middleware(RequestMetricsMiddleware, metrics=requests),
            Middleware(SecurityHeadersMiddleware),
            Middleware(RequestIdMiddleware),
            *_foreign_origins(settings),
            Middleware(HostGuardMiddleware, settings=settings),
            Middleware(AuthenticationMiddleware),
            Middleware(DiskGuardMiddleware),
            Middleware(AuditMiddleware),
            Middleware(BodyLimitMiddleware, settings=settings),
        ],
    )
    api.state.database_reserve = DatabaseReserve.for_home(settings.home, settings.database_url)
    api.state.settings, api.state.requests, api.state.tracing = settings, requests, tracing
    errors.install_handlers(api)
    api.include_router(app.api.health.router)
    # The router tries the paths one after the other, so runs come first, and pages, which are read once, last.
    for resource in (
        app.runs.reading.metrics.endpoints,  # before the paths with `{run_id}`: it has `/runs/curves`
        app.runs.endpoints,
        app.runs.reading.logs.endpoints,
        app.runs.events.endpoints,
        app.runs.events.history,
        app.runs.state.actions.endpoints,
        app.runs.state.checkpoints.endpoints,
        app.runs.state.artifacts.endpoints,
        app.runs.reading.postmortem.endpoints,
        app.experiments.endpoints,
        app.datasets.endpoints,
        app.backends.endpoints,
        app.workers.endpoints,
        app.runs.queue.pause.endpoints,
        app.usage.endpoints,
        app.models.endpoints,
        app.api_keys.endpoints,
        app.api_keys.sessions,
        app.secrets.endpoints,
        app.webhooks.endpoints,
        app.audit.endpoints,
    ):
        api.include_router(resource.router, prefix="/v1", dependencies=[Depends(refuse_unknown_parameters)])
    for compatible in (
        app.openai.models,
        app.openai.files,
        app.openai.jobs.endpoints,
        app.openai.jobs.graders,
        app.openai.chat,
        app.openai.webhooks,
    ):
        api.include_router(
            compatible.router,
            prefix="/openai/v1",
            tags=["OpenAI-compatible"],
            dependencies=[Depends(refuse_unknown_parameters)],
        )
    api.include_router(docs_page.router)
    api.include_router(app.prometheus.endpoints.router)
    api.include_router(app.web.endpoints.router)
    api.router.default = app.web.endpoints.with_page_for_people(api.router.default)
    return api


def _tracing_middleware(tracing: Tracing) -> list[Middleware]:
    if not tracing.is_on:
        return []
    from app.api.middleware.tracing import TracingMiddleware  # needs the packages of OpenTelemetry

    return [Middleware(TracingMiddleware, tracing=tracing)]


def _foreign_origins(settings: Settings) -> list[Middleware]:
    """Return the middleware that lets pages of the allowed origins read responses, errors among them."""
    if not settings.foreign_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=settings.foreign_origins,
            allow_methods=["GET", "POST", "PATCH", "PUT", "DELETE"],
            allow_headers=["Authorization", "Content-Type", "Idempotency-Key", "Last-Event-ID"],
            expose_headers=["Location", "Retry-After", "X-Request-ID"],
            max_age=600,
        )
    ]


def _external_engine(settings: Settings, storage: Storage) -> "ExternalEngine | None":
    if settings.engine_url is None:
        return None
    # It imports an HTTP client, for which an API without an engine does not wait.
    from app.openai.external_engine import ExternalEngine

    return ExternalEngine(settings, storage)


@asynccontextmanager
async def _lifespan(api: FastAPI) -> AsyncIterator[None]:
    """Create and close the resources of the process; does not wait for servers that may be unavailable."""
    settings: Settings = api.state.settings
    engine = async_engine(settings.database_url or "")
    sessions = session_maker(engine)
    storage = Storage.shared(settings)
    queue = Broker(settings)
    dispatching = async_engine(settings.database_url or "", pool_size=1)
    dispatcher = Dispatcher(dispatching, queue, settings, WORKER_BACKENDS)
    streams = Streams(engine, queue)
    api.state.engine, api.state.sessions, api.state.storage = engine, sessions, storage
    reading = async_engine(settings.database_url or "", pool_size=5, reads_only=True)
    api.state.reading_engine, api.state.reading_sessions = reading, session_maker(reading)
    repeatable = engine.execution_options(isolation_level="REPEATABLE READ")
    api.state.snapshot_engine, api.state.snapshot_sessions = repeatable, session_maker(repeatable)
    api.state.auth, api.state.queue, api.state.streams = KeyVerifier(sessions), queue, streams
    placing = async_engine(settings.database_url or "", pool_size=1)
    ray_jobs = RayJobs(placing, queue, settings)
    api.state.backends = {
        name: RayBackend(rules, sessions, settings, storage, queue, streams, wake=ray_jobs.start_round)
        if rules.starts_workers
        else CeleryBackend(rules, sessions, settings, storage, queue, streams)
        for name, rules in BACKEND_RULES.items()
    }
    sending = async_engine(settings.database_url or "", pool_size=1)
    webhooks = WebhookSender(sending, settings)
    api.state.questions = questions = Questions(settings, sessions)
    api.state.external_engine = external_engine = _external_engine(settings, storage)
    api.state.open_streams = OpenStreams(settings.streams_per_key)
    api.state.estimate_turns = EstimateTurns()
    api.state.open_downloads = OpenDownloads(DOWNLOADS_PER_KEY)
    api.state.curve_reads = asyncio.Semaphore(app.runs.reading.metrics.curves.READS_AT_A_TIME)
    api.state.log_searches = asyncio.Semaphore(app.runs.reading.logs.endpoints.SEARCHES_AT_A_TIME)
    api.state.eta = EtaService(settings, WORKER_BACKENDS, api.state.reading_sessions)
    api.state.snapshots = Snapshots(dispatching, settings)
    api.state.metrics = Metrics(api.state.requests, streams, queue, dispatcher, webhooks)
    return_large_blocks()
    # Every stream stalls during a full garbage collection, so collections skip all objects that exist now, and a full
    # one runs after some millions of new objects instead of every 70,000 (a thousand streams have 300,000).
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    await queue.start()
    await questions.start()
    await dispatcher.start()
    await ray_jobs.start()
    await webhooks.start()
    sweeping = app.datasets.service.sweep_in_background(sessions, storage)
    pruning = app.runs.retention.in_background(engine, storage, settings)
    try:
        yield
    finally:
        sweeping.cancel()
        pruning.cancel()
        await questions.stop()
        if external_engine is not None:
            await external_engine.close()
        await webhooks.stop()
        await ray_jobs.stop()
        await dispatcher.stop()
        await streams.close()
        await queue.close()
        await dispatching.dispose()
        await placing.dispose()
        await sending.dispose()
        await engine.dispose()
        await reading.dispose()
        await asyncio.to_thread(api.state.tracing.close)
