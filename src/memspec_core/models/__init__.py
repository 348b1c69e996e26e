"""Checkpoints, their decoder forward, and their text."""
