"""Makes the ASGI app that answers requests with a session."""

from __future__ import annotations

import codecs
import json
import re
import time
from collections.abc import Callable, Coroutine
from email.message import Message
from functools import partial
from typing import Any, TypeVar, cast

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from pass_runtime import Session, __version__
from pass_server import middleware
from pass_server.answers import ChatFormatter, CompletionFormatter
from pass_server.api_error import ApiError, validation_error
from pass_server.page import add_page
from pass_server.prometheus import PrometheusSink
from pass_server.responses_input import ChatConversion, ResponsesRequest
from pass_server.responses_output import ResponsesFormatter
from pass_server.schemas import ChatRequest, CompletionRequest
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
            header = Message()
            header["content-type"] = request.headers.get("content-type", "")
            if not re.fullmatch(r"application/(json|.*\+json)", header.get_content_type()):
                raise ApiError("the body must be a JSON object, sent as application/json")
            service: Service = request.app.state.service
            request.state.arrived = time.perf_counter()
            async with service.time_limit(request.state.arrived):
                parse, size = partial(parse_body, model, body), len(body)
                is_short = size <= SHORT_BODY_BYTES
                parsed = parse() if is_short else await service.run_in_thread(parse, size)
                response: Response = await self.endpoint(parsed, request)
            return response

        return handle


def parse_body(model: type[M], body: bytes) -> M:
    """Return the body as an instance of `model`. Raises ApiError for the first invalid field."""
    if (
        len(body) > MAX_JSON_NODES
        and _num_nodes(body) > MAX_JSON_NODES
        and _num_nodes(_JSON_STRING.sub(b"", body)) > MAX_JSON_NODES
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


def _num_nodes(body: bytes) -> int:
    return body.count(b"[") + body.count(b"{") + body.count(b":")


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
    503: "The server warms up or shuts down.",
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
    middleware.add_error_handlers(app)
    _add_endpoints(app, service)
    add_tokenize_endpoints(app, service, ERRORS)
    _add_probes(app, service, sink)
    if options.page:
        add_page(app)
    # The middleware that is added last gets a request first.
    app.add_middleware(
        middleware.BodyLimit, max_bytes=options.max_body_bytes, seconds=options.client_seconds
    )
    app.add_middleware(middleware.Admission, keys=options.keys)
    app.add_middleware(middleware.RequestTarget, routes=app.routes)
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_origins,
            allow_methods=("GET", "HEAD", "POST", "OPTIONS"),
            allow_headers=("*",),
            expose_headers=("Retry-After",),
        )
    app.add_middleware(middleware.ResponseLog, model=model, sink=sink)
    return app


def _add_endpoints(app: FastAPI, service: Service) -> None:
    card = {"id": service.model, "object": "model", "created": int(time.time()), "owned_by": "pass"}

    async def generate(
        request: CompletionRequest | ChatRequest,
        http: Request,
        formatter_class: type[CompletionFormatter | ChatFormatter],
        *,
        logprobs: bool,
    ) -> Response:
        service.check_model(request.model)
        size = len(await http.body())
        parsed = await service.parse(request, size, http.state.client, http.state.arrived)
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

    @app.post("/v1/responses", response_class=Response, responses=RESPONSES)
    async def create_response(request: ResponsesRequest, http: Request) -> Response:
        service.check_model(request.model)
        size = len(await http.body())
        conversion = await service.run_in_thread(partial(ChatConversion, request), size)
        chat, state = conversion.chat, http.state
        parsed = await service.parse(chat, size, state.client, state.arrived)
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


class Entry:
    """The ASGI app of a server: alive but not ready until `app` is set to that of the session."""

    def __init__(self) -> None:
        self.app: ASGIApp = middleware.RequestTarget(_warming_up)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


async def _warming_up(scope: Scope, receive: Receive, send: Send) -> None:
    headers = {"Retry-After": "5", "Connection": "close"}
    response: Response
    if middleware.app_path(scope) == "/health":
        response = JSONResponse({"status": "ok"}, headers={"Connection": "close"})
    elif middleware.app_path(scope) == "/ready":
        response = JSONResponse({"ready": False}, 503, headers=headers)
    else:
        problem = "the server is warming up; try again later"
        response = middleware.as_response(
            ApiError(problem, 503, code="warming_up", headers=headers)
        )
    await response(scope, receive, send)
