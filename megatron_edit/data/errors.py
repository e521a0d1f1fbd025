"""Named errors of the data part.

`DataError` is what is wrong with flags or files and is found before training (exit code 2);
`LoaderError` is what goes wrong while training reads (exit code 1).
"""


class DataError(ValueError):
    """A flag, a file or a tokenizer that cannot be used; the message names it and what would work."""


class LoaderError(RuntimeError):
    """Samples could not be read while training; `__cause__` holds the first error."""
