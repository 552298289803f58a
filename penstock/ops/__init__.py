"""One namespace of operations: a plain torch reference, and faster implementations beside it."""
