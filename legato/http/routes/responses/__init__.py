"""OpenAI's Responses API: items instead of messages, and a store of responses.

translation.py   a request → `ChatRequest`
tools.py         its tools → functions, and which of them were something else
output.py        the parts of an answer → items and events
job.py           from a checked request to the response object
store.py         responses by id, for GET and `previous_response_id`
background.py    responses that go on without their client
routes.py        /v1/responses and what is below it
"""
