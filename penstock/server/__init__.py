"""The API process: HTTP endpoints in front of the engine. Nothing here imports torch."""
