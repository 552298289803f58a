"""CPU ops in C++: `library` loads the shared library, `ops` calls it, `packed` holds weights.

The sources are in ``csrc``.
"""
