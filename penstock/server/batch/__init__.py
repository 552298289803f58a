"""Batch files: runs one request per line through the app and writes one result per line."""
