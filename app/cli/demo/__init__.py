"""`anneal demo`: fine-tunes a small model through the HTTP API of the service."""
