"""Anthropic's Messages API, translated to chat completions.

translation.py   a request → `ChatRequest`
messages.py      POST /v1/messages, /v1/messages/count_tokens
blocks.py        the parts of an answer → blocks and events
errors.py        any error of a request, as Anthropic's clients expect it
"""
