"""Sizes of the cases."""

import os

FULL_SIZE = bool(os.environ.get("LIT_FT_FULL_SIZE"))
"""Whether each case runs at the size that docs/numerics.md was measured with: all layers, epochs and repetitions."""
