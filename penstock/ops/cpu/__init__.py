"""Ops in C++ for CPUs: `library` finds and describes the shared library, `ops` calls it, `packed`
holds weights in its layout. The sources are in ``csrc``."""
