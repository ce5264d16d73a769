"""Stages and a schedule become a plan."""
