"""The form of a message in a conversation, for clients of the server, lines of a batch, and saved files."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Role = Literal["system", "developer", "user", "assistant"]


def template_role(role: Role) -> str:
    """The role that chat templates use: a developer's message is a system message."""
    return "system" if role == "developer" else role


class TextMessage(BaseModel):
    """{"role", "content"}, and no other fields."""

    model_config = ConfigDict(extra="forbid", strict=True)
    role: Role
    content: str

    def plain(self) -> dict[str, str]:
        """The message in the form that chat templates take."""
        return {"role": template_role(self.role), "content": self.content}
