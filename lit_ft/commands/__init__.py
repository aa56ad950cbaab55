"""Commands, one file each, with a function ``run(arguments)``."""
