"""The JSON of OpenAI's Responses API."""
