"""Python clients for the HTTP API: `Client` and `AsyncClient`, the types of their answers, and their errors.

from legato.client import Client

client = Client("http://127.0.0.1:3000")
for item in client.generate_stream("The capital of France is", max_new_tokens=20):
    print(item.token.text, end="", flush=True)
"""

from legato.client.aio import AsyncClient
from legato.client.sync import Client
from legato.client.types import *  # noqa: F403 - TGI's names

__all__ = ["AsyncClient", "Client"]
