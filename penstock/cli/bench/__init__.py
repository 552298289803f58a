"""`penstock bench`: measures an engine's performance. One module per benchmark."""
