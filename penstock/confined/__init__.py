"""Runs work on untrusted input in processes that can be killed. No torch."""
