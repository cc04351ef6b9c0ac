"""A disk that is full after so many bytes of a file: the limit of the system, so every library meets a real failure."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """Inside, no file grows beyond `num_bytes`; writing on fails as on a full disk (EFBIG in place of ENOSPC)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
