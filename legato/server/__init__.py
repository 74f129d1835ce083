"""The model server: a gRPC service around an engine that runs the steps it is given. Never imports an HTTP library."""
