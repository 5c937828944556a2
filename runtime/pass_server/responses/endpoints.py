"""The endpoints of /v1/responses."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response

from pass_server.errors import ApiError
from pass_server.responses.chat import AsChat
from pass_server.responses.schemas import ResponsesRequest
from pass_server.responses.shape import ResponsesShape
from pass_server.service import Service
from pass_server.streaming import GenerationResponse


def add_responses(app: FastAPI, service: Service, responses: Any) -> None:
    """responses: how the OpenAPI document describes answers and refusals."""

    @app.post("/v1/responses", response_class=Response, responses=responses)
    async def create_response(request: ResponsesRequest, http: Request) -> Response:
        service.check_model(request.model)
        size = len(await http.body())
        as_chat = await service.read(partial(AsChat, request), size)
        try:
            parsed = await service.parse(as_chat.chat, size, http.state.client)
        except ApiError as error:
            raise as_chat.own(error) from None
        shape = ResponsesShape(service.model, as_chat.echo)
        return GenerationResponse(service, parsed, shape, stream=bool(request.stream))

    @app.api_route("/v1/responses/{path:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
    async def stored_response(path: str) -> Response:
        raise ApiError(
            f"no response {path.partition('/')[0]!r} here: this server stores no responses, it only creates them",
            404,
            param="response_id",
            code="response_not_stored",
        )
