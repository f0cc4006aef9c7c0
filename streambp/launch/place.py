"""Placing the hook in this environment, so that STREAMBP_LAUNCH alone switches it on."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from streambp.errors import StreamBPError

NAME = "streambp_launch.pth"


def place(folder: Path | None = None) -> Path:
    """Write the file; over one that is there.

    Args:
        folder: a folder whose .pth files Python reads; this interpreter's site-packages if None.

    Raises:
        StreamBPError: it cannot be written.
    """
    file = Path(folder or sysconfig.get_path("purelib"), NAME)
    # What Python runs at each start: one look into the environment, and nothing else without STREAMBP_LAUNCH.
    loader = str(Path(__file__).parent / "site" / "sitecustomize.py")
    names = f"{{'__name__': 'streambp_launch', '__file__': {loader!r}}}"
    run = f"exec(compile(open({loader!r}).read(), {loader!r}, 'exec'), {names})"
    try:
        file.write_text(f"import os; os.environ.get('STREAMBP_LAUNCH') and {run}\n", "utf-8")
    except OSError as error:
        raise StreamBPError(
            f"{file} cannot be written ({error.strerror}). Use an environment of your own, or `streambp launch -- COMMAND`."
        ) from error
    return file


def remove(folder: Path | None = None) -> Path | None:
    """Take it off again; None if there was none.

    Raises:
        StreamBPError: it cannot be removed.
    """
    file = Path(folder or sysconfig.get_path("purelib"), NAME)
    try:
        file.unlink()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StreamBPError(f"{file} cannot be removed ({error.strerror}). Remove it by hand.") from error
    return file
