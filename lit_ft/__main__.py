"""Entry point of ``python -m lit_ft``."""

from lit_ft.cli import main

if __name__ == "__main__":
    main()
