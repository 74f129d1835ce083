"""What the HTTP workers record of requests: log lines and spans."""
