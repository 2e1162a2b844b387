"""From the bytes of a file, in pieces of any size, to its rows: a reader for each kind of file."""
