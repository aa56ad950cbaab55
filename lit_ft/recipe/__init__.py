"""Recipes: the parser, what a parsed recipe may hold, and the code that it may name."""
