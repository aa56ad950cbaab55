"""Config of the base model: values of a recipe in place of its own, and the positions that it is made for."""
