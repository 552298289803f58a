"""HTTP itself: from a socket to a checked body, and from a reply back to the socket."""
