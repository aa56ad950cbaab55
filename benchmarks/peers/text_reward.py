"""Reward of all contestants: it asks for nothing but an answer's text, and differs between answers of any weights."""


def length_of(text: str) -> float:
    """Characters of a text other than white space, in hundreds."""
    return len("".join(text.split())) / 100
