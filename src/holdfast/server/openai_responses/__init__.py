"""OpenAI's Responses API in front of our chats: /v1/responses, and what is kept of responses."""
