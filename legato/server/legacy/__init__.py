"""TGI's unary Prefill and Decode calls, on the engine of the step stream."""
