"""One operation per file: a public function, a torch version that defines the result, a Triton version."""
