"""Turns of a conversation: messages and tools in, typed pieces of the next message out."""
