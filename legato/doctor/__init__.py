"""`legato doctor`: checks whether this machine can serve, and says how to fix what it finds."""
