"""Renders conversations to prompts: one interface, one file per model family."""
