"""Install the hook in this environment, so that the variable STREAMBP_LAUNCH alone enables it."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from streambp.errors import StreamBPError

PTH_FILE = "streambp_launch.pth"


def install_hook(folder: Path | None = None) -> Path:
    """Write the .pth file with which later Python processes load streambp's import hook at their
    start, if the environment variable STREAMBP_LAUNCH is set. The hook patches models. Return the
    file's path.

    Args:
        folder: a folder whose .pth files Python reads; None: this interpreter's site-packages.

    Raises:
        StreamBPError: the file cannot be written.
    """
    file = Path(folder or sysconfig.get_path("purelib"), PTH_FILE)
    # Python runs this line at each start. Without STREAMBP_LAUNCH it only reads the environment.
    loader = str(Path(__file__).parent / "site" / "sitecustomize.py")
    names = f"{{'__name__': 'streambp_launch', '__file__': {loader!r}}}"
    run = f"exec(compile(open({loader!r}).read(), {loader!r}, 'exec'), {names})"
    try:
        file.write_text(f"import os; os.environ.get('STREAMBP_LAUNCH') and {run}\n", "utf-8")
    except OSError as error:
        raise StreamBPError(
            f"{file} cannot be written ({error.strerror}). Use an environment of your own, or "
            "`streambp launch -- COMMAND`."
        ) from error
    return file


def remove(folder: Path | None = None) -> Path | None:
    """Delete the .pth file that makes Python load streambp's import hook at its start
    (`install_hook`). Return the file's path; None if there was no file.

    Args:
        folder: the folder of the file; None: this interpreter's site-packages.

    Raises:
        StreamBPError: the file cannot be removed.
    """
    file = Path(folder or sysconfig.get_path("purelib"), PTH_FILE)
    try:
        file.unlink()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StreamBPError(
            f"{file} cannot be removed ({error.strerror}). Delete the file yourself."
        ) from error
    return file
