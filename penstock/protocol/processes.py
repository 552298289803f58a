"""How processes of this package are started."""

from __future__ import annotations

import sys


def module_command(module: str, *arguments: str) -> list[str]:
    """Runs `main` of a module. It finds whatever this process does, and what it is told to by its
    environment.

    With ``python -m`` the working directory would come first: whoever may put a file there could
    run code here.
    """
    code = (
        f"import sys; ours, own = {sys.path!r}, sys.path[sys.path[:1] == [''] :]; "
        "sys.path[:] = dict.fromkeys([*ours[:1], *own, *ours]); "
        f"from {module} import main; sys.exit(main())"
    )
    return [sys.executable, "-c", code, *arguments]
