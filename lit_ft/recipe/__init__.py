"""Recipes: the parser, checks of parsed values, and the allow-list of code."""
