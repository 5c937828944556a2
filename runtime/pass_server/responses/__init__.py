"""/v1/responses: a request is read as a chat, and its answer is told as items of output. Nothing is stored."""
