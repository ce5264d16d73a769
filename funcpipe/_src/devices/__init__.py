"""Streams, copies to the host and back, recorded work, and which device a lane has."""
