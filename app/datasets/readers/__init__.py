"""Streaming readers, one per file type, that turn chunks of bytes into rows."""
