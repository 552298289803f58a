"""The `penstock` command: one file for each of its commands. Nothing here imports torch early."""
