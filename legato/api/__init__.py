"""The bodies of requests and answers, and the errors that clients see. Shared by the HTTP side, the client and the benchmark."""
