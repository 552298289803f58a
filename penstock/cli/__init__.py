"""The `penstock` command: one module per subcommand. torch is imported only when needed."""
