"""The served models as Anthropic's API lists them, made of OpenAI's cards."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any


def model_info(card: dict[str, Any]) -> dict[str, Any]:
    created = datetime.fromtimestamp(card["created"], UTC).isoformat().replace("+00:00", "Z")
    context = card["max_model_len"]
    return {
        "type": "model",
        "id": card["id"],
        "display_name": card["id"],
        "created_at": created,
        "lifecycle": "active",
        "max_input_tokens": context,
        "max_tokens": context,
    }


def model_page(cards: list[dict[str, Any]]) -> dict[str, Any]:
    """All on one page."""
    listed = [model_info(card) for card in cards]
    return {"data": listed, "has_more": False, "first_id": listed[0]["id"], "last_id": listed[-1]["id"]}
