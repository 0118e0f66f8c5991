"""Where pagegraph keeps what it need not make again."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """$PAGEGRAPH_CACHE_DIR, else ~/.cache/pagegraph. It may not exist yet."""
    return Path(os.environ.get("PAGEGRAPH_CACHE_DIR") or "~/.cache/pagegraph").expanduser()
