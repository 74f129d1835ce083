"""One module or folder per API."""
