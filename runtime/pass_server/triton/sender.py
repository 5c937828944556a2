"""The responses of one request."""

from __future__ import annotations

from typing import Any

import numpy as np

from pass_server.errors import ApiError
from pass_server.triton.output_tensors import Arrays


class ResponseSender:
    """Sends the responses of one request to Triton, for one thread. After the last response it never touches Triton's
    sender again: the server crashes where an ended request is checked for cancellation."""

    def __init__(self, pb_utils: Any, request: Any) -> None:
        self._pb_utils, self._sender = pb_utils, request.get_response_sender()
        self._ended = False

    @property
    def cancelled(self) -> bool:
        """Whether the client has cancelled the request before its last response."""
        return not self._ended and self._sender.is_cancelled()

    def send(self, arrays: Arrays, *, last: bool) -> None:
        tensors = [self._pb_utils.Tensor(name, np.ascontiguousarray(array)) for name, array in arrays.items()]
        self._send(self._pb_utils.InferenceResponse(output_tensors=tensors), last=last)

    def refuse(self, error: ApiError) -> None:
        codes = self._pb_utils.TritonError
        named = {400: codes.INVALID_ARG, 404: codes.NOT_FOUND, 429: codes.UNAVAILABLE, 503: codes.UNAVAILABLE}
        self._end(error.message, named.get(error.status, codes.INTERNAL))

    def end_cancelled(self) -> None:
        self._end("the client has cancelled the request", self._pb_utils.TritonError.CANCELLED)

    def _end(self, message: str, code: Any) -> None:
        if not self._ended:
            error = self._pb_utils.TritonError(message, code)
            self._send(self._pb_utils.InferenceResponse(error=error), last=True)

    def _send(self, response: Any, *, last: bool) -> None:
        self._ended = last
        self._sender.send(response, flags=self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0)
