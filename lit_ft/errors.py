"""The error for what a user can mend."""


class RecipeError(ValueError):
    """Something in the recipe, the data or the folders is wrong.

    The message is one line: the value, the rule, and the fix. The command line prints it without a
    traceback and exits with code 2.
    """
