"""Monitoring of the router: health, metrics, dashboard and traces."""
