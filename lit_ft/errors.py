"""The errors for what a user can mend."""


class RecipeError(ValueError):
    """Something in the recipe, the data or the folders is wrong.

    The message is one line: the value, the rule, and the fix. The command line prints it without a
    traceback and exits with code 2.
    """


class BadRow(ValueError):
    """One row of the data cannot be used; what reads it knows the place and says it."""
