"""Turns of a conversation: renders messages and tools, parses outputs into typed pieces."""
