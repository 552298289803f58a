"""HTTP: the API process. Nothing here imports torch."""
