"""Operations: each has a plain torch reference, and faster implementations beside it."""
