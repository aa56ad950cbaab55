"""Sizes of the cases: small ones by default, or those that docs/numerics.md was measured with."""

import os

FULL_SIZE = bool(os.environ.get("LIT_FT_FULL_SIZE"))
"""Whether cases have all layers, epochs and repetitions, and compile for minutes; the cases are the same ones."""
