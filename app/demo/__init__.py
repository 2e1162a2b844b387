"""`anneal demo`: a model fine-tuned through the service, driven over HTTP like any client would."""
