"""Request and response bodies, and the errors that clients see: shared by http, client and benchmark."""
