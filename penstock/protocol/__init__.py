"""What crosses boundaries between layers and processes. Nothing here imports torch."""
