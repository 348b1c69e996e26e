"""Counts and times, all read from the events that the runtime gives."""
