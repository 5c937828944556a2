"""The app: `make_app(session, options)`. Any ASGI server can run it; `server.py` does so with uvicorn."""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

import pass_runtime
from pass_runtime.session import Session
from pass_server.bodies import BodyRoute
from pass_server.errors import ApiError
from pass_server.handlers import add_handlers
from pass_server.middleware import BodyLimit, ConnectionLimit, KeyCheck, ResponseLog
from pass_server.options import ServeOptions
from pass_server.prometheus import PrometheusSink
from pass_server.response_shapes import ChatShape, CompletionShape, ResponseShape
from pass_server.responses.endpoints import add_responses
from pass_server.schemas import ChatRequest, CompletionRequest, Sampled
from pass_server.service import Service
from pass_server.streaming import GenerationResponse
from pass_server.tokenizing import add_tokenizing

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "object", "required": ["message", "type", "param", "code"]}},
}
_DESCRIPTIONS = {
    400: "Refused.",
    401: "No valid key.",
    404: "No such model.",
    408: "The body came too slowly.",
    413: "Too large.",
    429: "Too much to do.",
    500: "It failed.",
    503: "Shutting down.",
    504: "It took too long.",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": description, "content": {"application/json": {"schema": _ERROR}}}
    for status, description in _DESCRIPTIONS.items()
}
RESPONSES: dict[int | str, dict[str, Any]] = ERRORS | {
    200: {
        "description": "The answer; with stream, server-sent events.",
        "content": {"application/json": {}, "text/event-stream": {}},
    }
}


def make_app(session: Session, options: ServeOptions | None = None) -> FastAPI:
    """Requests become sequences of `session`, which the caller closes. `app.state.service` is the `Service`, which a
    server drains when it stops."""
    options = options or ServeOptions()
    model = options.model_name or session.manifest.model.name
    sink = PrometheusSink(session, model)
    service = Service(session, options, model, sink)
    app = FastAPI(title="PaSS", version=pass_runtime.__version__, docs_url=None, redoc_url=None)
    app.state.service = service
    app.router.route_class = BodyRoute
    add_handlers(app)
    _add_endpoints(app, service)
    add_responses(app, service, RESPONSES)
    add_tokenizing(app, service, ERRORS)
    _add_probes(app, service, sink)
    app.add_middleware(BodyLimit, most=options.max_body_bytes, seconds=options.client_seconds)
    app.add_middleware(ConnectionLimit)
    app.add_middleware(KeyCheck, keys=options.keys)
    app.add_middleware(ResponseLog, model=model, sink=sink)
    return app


def _add_endpoints(app: FastAPI, service: Service) -> None:
    card = {"id": service.model, "object": "model", "created": int(time.time()), "owned_by": "pass"}

    async def generate(request: Sampled, http: Request, shape: type[ResponseShape], *, logprobs: bool) -> Response:
        service.check_model(request.model)
        parsed = await service.parse(request, len(await http.body()), http.state.client)
        usage = bool(request.stream_options and request.stream_options.include_usage)
        shaped = shape(service.model, service.texts, logprobs=logprobs, include_usage=usage)
        return GenerationResponse(service, parsed, shaped, stream=bool(request.stream))

    @app.post("/v1/completions", response_class=Response, responses=RESPONSES)
    async def completions(request: CompletionRequest, http: Request) -> Response:
        return await generate(request, http, CompletionShape, logprobs=request.logprobs is not None)

    @app.post("/v1/chat/completions", response_class=Response, responses=RESPONSES)
    async def chat_completions(request: ChatRequest, http: Request) -> Response:
        return await generate(request, http, ChatShape, logprobs=bool(request.logprobs))

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
        """200 while the process answers and its session is open."""
        if service.session.closed:
            raise ApiError("the session is closed", 503)
        return {"status": "ok"}

    @app.get("/ready", responses={503: ERRORS[503]})
    async def ready() -> JSONResponse:
        """200 while new requests are taken."""
        ready = not service.draining and not service.session.closed
        return JSONResponse({"ready": ready}, 200 if ready else 503)

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        return Response(sink.text(), media_type=CONTENT_TYPE_LATEST)
