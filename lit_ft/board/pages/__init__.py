"""Pages of the board, in NiceGUI."""
