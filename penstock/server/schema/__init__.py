"""What the bodies and replies of all APIs are made of."""
