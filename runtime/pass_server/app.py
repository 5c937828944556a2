"""Makes the ASGI app that answers requests with a session. `server.py` runs it with uvicorn;
another ASGI server can run it too."""

from __future__ import annotations

import codecs
import json
import re
import time
from collections.abc import Callable, Coroutine, Iterator
from email.message import Message
from functools import cache, partial
from typing import Any, TypeVar, cast

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.middleware.cors import CORSMiddleware

from pass_runtime import Session, __version__
from pass_server.api_error import ApiError, validation_error
from pass_server.formatters import ChatFormatter, ChoicesFormatter, CompletionFormatter
from pass_server.metrics import HTTP_RESPONSES, RECORDED, Metric, read_gauges
from pass_server.middleware import (
    Admission,
    BodyLimit,
    HeadAsGet,
    OptionsMethod,
    RequestTarget,
    ResponseLog,
    add_error_handlers,
)
from pass_server.page import add_page
from pass_server.responses_chat import ChatConversion
from pass_server.responses_fields import ResponsesRequest
from pass_server.responses_output import ResponsesFormatter
from pass_server.schemas import ChatRequest, CompletionRequest, GenerationRequest
from pass_server.serve_options import ServeOptions
from pass_server.service import Service
from pass_server.streaming import GenerationResponse
from pass_server.tokenizing import add_tokenize_endpoints

M = TypeVar("M", bound=BaseModel)
SHORT_BODY_BYTES = 1 << 12
"""Bodies up to this size are parsed in the event loop: handing them to a thread takes longer."""
MAX_JSON_NODES = 1 << 16
"""The most objects, fields and lists in a body: no other thread runs while they are parsed."""
# A JSON string; at the end of a body that is cut off, also one without its closing quotation mark.
_JSON_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


class BodyRoute(APIRoute):
    """A route that parses the body, in a thread if it is long, and calls the endpoint with the
    result and the `Request`. FastAPI itself would parse every body in the event loop."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        if self.body_field is None:
            return super().get_route_handler()
        model = cast(type[BaseModel], self.body_field.field_info.annotation)

        async def handle(request: Request) -> Response:
            body = await request.body()
            if not _is_json(request.headers.get("content-type", "")):
                raise ApiError("the body must be a JSON object, sent as application/json")
            if len(body) <= SHORT_BODY_BYTES:
                parsed = parse_body(model, body)
            else:
                service: Service = request.app.state.service
                work = partial(parse_body, model, body)
                parsed = await service.run_in_thread(work, len(body))
            response: Response = await self.endpoint(parsed, request)
            return response

        return handle


def parse_body(model: type[M], body: bytes) -> M:
    """Return the body as an instance of `model`. Raises ApiError for the first invalid field."""
    # The fast first count may be too high, because strings may contain `[`, `{` and `:`.
    if (
        _count_json_nodes(body) > MAX_JSON_NODES
        and _count_json_nodes(_JSON_STRING.sub(b"", body)) > MAX_JSON_NODES
    ):
        problem = f"the body has more than {MAX_JSON_NODES} objects, fields and lists"
        raise ApiError(problem, code="body_too_large")
    body = body.removeprefix(codecs.BOM_UTF8)
    if not (encoding := json.detect_encoding(body)).startswith("utf-8"):
        problem = f"the body is {encoding.upper()} or binary; send JSON in UTF-8"
        raise ApiError(problem, code="invalid_json")
    try:
        # Up to five times as fast as `json`, so that other threads wait less.
        value = from_json(body.decode(), allow_inf_nan=False)
    except UnicodeDecodeError:
        problem = "the body is not UTF-8; send JSON in UTF-8"
        raise ApiError(problem, code="invalid_json") from None
    except ValueError as error:
        raise ApiError(f"the body is not JSON: {error}", code="invalid_json") from None
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise validation_error(error) from None


def _count_json_nodes(body: bytes) -> int:
    """Return the number of objects, fields and lists in JSON that has no strings."""
    return body.count(b"[") + body.count(b"{") + body.count(b":")


def _is_json(content_type: str) -> bool:
    """Return whether a Content-Type stands for JSON, as application/json does."""
    message = Message()
    message["content-type"] = content_type
    subtype = message.get_content_subtype()
    return message.get_content_maintype() == "application" and (
        subtype == "json" or subtype.endswith("+json")
    )


_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "object", "required": ["message", "type", "param", "code"]}},
}
_ERROR_DESCRIPTIONS = {
    400: "The request is invalid.",
    401: "No valid API key.",
    404: "No such model.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body has a Content-Encoding other than gzip and zstd.",
    429: "The server is busy; retry after the time in Retry-After.",
    500: "The server failed.",
    503: "The server warms up, shuts down, or has too many connections.",
    504: "The request took too long.",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": description, "content": {"application/json": {"schema": _ERROR_SCHEMA}}}
    for status, description in _ERROR_DESCRIPTIONS.items()
}
"""The error responses in the OpenAPI document, by status."""
RESPONSES: dict[int | str, dict[str, Any]] = ERRORS | {
    200: {
        "description": "The answer; with stream, server-sent events.",
        "content": {"application/json": {}, "text/event-stream": {}},
    }
}
"""All responses of the endpoints that generate, in the OpenAPI document."""


def make_app(session: Session, options: ServeOptions | None = None) -> FastAPI:
    """Return the app that serves `session`, which the caller opens and closes. Before the server
    stops, the caller awaits `app.state.service.drain(seconds)`."""
    options = options or ServeOptions()
    model = options.model_name or session.manifest.model.name
    sink = PrometheusSink(session, model)
    service = Service(session, options, model, sink)
    app = FastAPI(
        title="PaSS", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.state.service = service
    app.router.route_class = BodyRoute
    add_error_handlers(app)
    _add_endpoints(app, service)
    _add_responses(app, service)
    add_tokenize_endpoints(app, service, ERRORS)
    _add_probes(app, service, sink)
    if options.page:
        add_page(app)
    # The middleware that is added last gets a request first.
    app.add_middleware(BodyLimit, max_bytes=options.max_body_bytes, seconds=options.client_seconds)
    app.add_middleware(Admission, keys=options.keys)
    app.add_middleware(OptionsMethod, routes=app.routes)
    app.add_middleware(HeadAsGet)
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_origins,
            allow_methods=("GET", "HEAD", "POST", "OPTIONS"),
            allow_headers=("*",),
            expose_headers=("Retry-After",),
        )
    app.add_middleware(ResponseLog, model=model, sink=sink)
    app.add_middleware(RequestTarget)
    return app


def _add_endpoints(app: FastAPI, service: Service) -> None:
    card = {"id": service.model, "object": "model", "created": int(time.time()), "owned_by": "pass"}

    async def generate(
        request: GenerationRequest,
        http: Request,
        formatter_class: type[ChoicesFormatter],
        *,
        logprobs: bool,
    ) -> Response:
        service.check_model(request.model)
        parsed = await service.parse(request, len(await http.body()), http.state.client)
        formatter = formatter_class(
            service.model,
            service.texts,
            logprobs=logprobs,
            include_usage=bool(request.stream_options and request.stream_options.include_usage),
            pass_details=bool(request.pass_details),
        )
        return GenerationResponse(service, parsed, formatter, stream=bool(request.stream))

    @app.post("/v1/completions", response_class=Response, responses=RESPONSES)
    async def completions(request: CompletionRequest, http: Request) -> Response:
        logprobs = request.logprobs is not None
        return await generate(request, http, CompletionFormatter, logprobs=logprobs)

    @app.post("/v1/chat/completions", response_class=Response, responses=RESPONSES)
    async def chat_completions(request: ChatRequest, http: Request) -> Response:
        return await generate(request, http, ChatFormatter, logprobs=bool(request.logprobs))

    @app.get("/v1/models", responses={401: ERRORS[401]})
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{model:path}", responses={401: ERRORS[401], 404: ERRORS[404]})
    async def model(model: str) -> dict[str, Any]:
        service.check_model(model)
        return card


def _add_probes(app: FastAPI, service: Service, sink: PrometheusSink) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        """Answer 200 while the session is open."""
        if service.session.closed:
            raise ApiError("the session is closed", 503)
        return {"status": "ok"}

    @app.get("/ready", responses={503: ERRORS[503]})
    async def ready() -> JSONResponse:
        """Answer 200 while the server takes new requests."""
        ready = not service.draining and not service.session.closed
        return JSONResponse({"ready": ready}, 200 if ready else 503)

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        return Response(sink.text(), media_type=CONTENT_TYPE_LATEST)


def _add_responses(app: FastAPI, service: Service) -> None:
    @app.post("/v1/responses", response_class=Response, responses=RESPONSES)
    async def create_response(request: ResponsesRequest, http: Request) -> Response:
        service.check_model(request.model)
        size = len(await http.body())
        conversion = await service.run_in_thread(partial(ChatConversion, request), size)
        try:
            parsed = await service.parse(conversion.chat, size, http.state.client)
        except ApiError as error:
            raise conversion.request_error(error) from None
        formatter = ResponsesFormatter(service.model, conversion.echo)
        return GenerationResponse(service, parsed, formatter, stream=bool(request.stream))

    @app.api_route(
        "/v1/responses/{path:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False
    )
    async def stored_response(path: str) -> Response:
        raise ApiError(
            f"no response {path.partition('/')[0]!r}: this server stores no responses; send "
            "the earlier items as input",
            404,
            param="response_id",
            code="response_not_stored",
        )


class PrometheusSink(Collector):
    """A `MetricSink` that keeps counters and histograms in a Prometheus registry of its own. Gauges
    are not recorded, but read from `session` for every request to /metrics."""

    def __init__(self, session: Session, model: str) -> None:
        self._session, self._model = session, model
        self._registry = CollectorRegistry()
        self._registry.register(self)  # for the gauges
        self._families: dict[Metric, Counter | Histogram] = {}
        self._recorder = cache(self._find_recorder)
        for metric in (*RECORDED, HTTP_RESPONSES):
            arguments = (metric.name, metric.description, ("model_name", *metric.labels))
            if metric.kind == "counter":
                self._families[metric] = Counter(*arguments, registry=self._registry)
            else:
                self._families[metric] = Histogram(
                    *arguments, registry=self._registry, buckets=metric.buckets
                )

    def record(self, metric: Metric, value: float, *labels: object) -> None:
        self._recorder(metric, *labels)(value)

    def _find_recorder(self, metric: Metric, *labels: object) -> Callable[[float], None]:
        """Return the function that records a value of `metric` with these labels."""
        labelled = self._families[metric].labels(*labels)
        return labelled.inc if isinstance(labelled, Counter) else labelled.observe

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the gauges, as the registry asks for them."""
        for metric, value, labels in read_gauges(self._session):
            names = ("model_name", *metric.labels)
            gauge = GaugeMetricFamily(metric.name, metric.description, labels=names)
            gauge.add_metric((self._model, *labels), value)
            yield gauge

    def text(self) -> bytes:
        """Return the body of /metrics."""
        return generate_latest(self._registry)
