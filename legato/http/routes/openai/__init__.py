"""OpenAI's completions and chat completions, on the same machinery as the native API.

requests.py         what comes in, field by field
responses.py        what goes out
errors.py           OpenAI's error object for any error of a request
terms.py            the fields that both routes share, checked
response_format.py  what the text must look like, in OpenAI's and TGI's shapes
prompts.py          text or token ids → Prompt
conversation.py     messages and tools → Prompt
calls.py            calls of tools in an answer
token_names.py      tokens as logprobs show them
logprobs.py         logprobs in either route's shape
chunks.py           the bytes of a stream's events
serving.py          permits, streams, choices, headers: what both routes do alike
completions.py      POST /v1/completions
chat.py             POST /v1/chat/completions, /chat_tokenize
models.py           GET /v1/models
"""
