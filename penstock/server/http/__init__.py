"""HTTP: sockets, protocols, middleware, request bodies, replies and errors."""
