"""What goes wrong with a conversion, by name."""

from __future__ import annotations


class ConversionError(ValueError):
    """Weights that cannot be converted, and which name, file or value is the reason. Nothing has been written."""
