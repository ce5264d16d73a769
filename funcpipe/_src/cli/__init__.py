"""Parsing and printing for the command line, and the demo."""
