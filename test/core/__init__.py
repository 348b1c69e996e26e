"""Tests of memspec_core, one file a room."""
