"""The base model: how its parts compute on padding-free rows."""
