"""What operators watch: metrics and traces."""
