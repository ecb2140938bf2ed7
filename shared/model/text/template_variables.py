"""Variables that a chat template gets beside the conversation, from a setting."""

from __future__ import annotations

import json
from typing import Any

from shared.errors import ConfigError

RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
"""Names that the conversation itself has."""


def template_variables(text: str) -> dict[str, Any]:
    """The setting `chat_template_kwargs`: a JSON object, or nothing. Raises ConfigError."""
    field = "chat_template_kwargs"
    try:
        variables = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{field} is not valid JSON: {error}", field=field) from None
    if not isinstance(variables, dict):
        raise ConfigError(f'{field} must be a JSON object, such as {{"enable_thinking": false}}', field=field)
    if taken := [name for name in RESERVED if name in variables]:
        raise ConfigError(f"{field} may not set {taken[0]}", field=field)
    return variables
