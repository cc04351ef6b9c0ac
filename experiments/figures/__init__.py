"""One figure per file; each has `save(data, ..., path)`."""
