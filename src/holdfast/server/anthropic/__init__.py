"""Anthropic's API in front of our chats: /v1/messages and /v1/messages/count_tokens."""
