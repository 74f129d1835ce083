"""What operators watch: Prometheus metrics."""
