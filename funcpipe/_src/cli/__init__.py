"""The words and tables of the command line, and its demo."""
