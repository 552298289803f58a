"""Base classes and field types for the bodies and replies of all APIs."""
