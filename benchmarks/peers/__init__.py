"""What lit_ft is compared with, each in an environment of its own; no module here needs lit_ft but ``bare_loop``."""
