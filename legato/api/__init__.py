"""Bodies of requests and answers, and the errors that clients see: shared by http, client and benchmark."""
