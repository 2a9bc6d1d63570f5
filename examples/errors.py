"""How the scripts end where a user can set things right."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def one_sentence_errors(*kinds: type[Exception]) -> Iterator[None]:
    """End the program with a sentence, not with a traceback."""
    try:
        yield
    except kinds as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")
