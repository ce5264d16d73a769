"""Pipe: a Sequential as a pipeline inside of plain autograd."""
