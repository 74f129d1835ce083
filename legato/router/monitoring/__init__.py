"""What the router tells about itself: health, metrics, the dashboard and traces."""
