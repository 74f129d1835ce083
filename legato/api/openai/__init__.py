"""Bodies of OpenAI's completions and chat completions."""
