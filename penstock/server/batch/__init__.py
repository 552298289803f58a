"""Batch files: a request a line in, a result a line out, through the same app."""
