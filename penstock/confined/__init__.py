"""Work that untrusted input can blow up, in processes that may be killed. No torch here."""
