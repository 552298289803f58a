"""Conversations rendered to prompts: one interface, one file a model family."""
