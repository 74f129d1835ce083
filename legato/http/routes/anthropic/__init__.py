"""Anthropic's Messages API: its words for what chat completions do.

translation.py   a request → `ChatRequest`
messages.py      POST /v1/messages, /v1/messages/count_tokens
blocks.py        the parts of an answer → blocks and events
errors.py        any error of a request, as Anthropic's clients expect it
"""
