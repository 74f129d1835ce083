"""The JSON of Anthropic's Messages API."""
