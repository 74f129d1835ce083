"""Everything about tensors: one gRPC service around one engine that runs the steps it is given. Never speaks HTTP."""
