"""What each step computes, and when a request is done. No torch."""
