"""The error of everything in this package."""


class EncodingError(ValueError):
    """Messages that have no text in the official format, or a text that is not in it."""
