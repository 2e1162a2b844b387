"""Generator of the reference pages in `docs/reference`; `make reference` writes them."""
