"""Draw the picture of the README from the page of a report: `python docs/pictures.py`, a part of `make docs`.

The predictions are simulated, so that the picture only changes when the page changes. A browser takes the picture:
Chromium or Chrome on the PATH. Without one, the picture stays as it is.
"""

import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import torchcalib

PICTURE = Path(__file__).parent / "report.png"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTH, HEIGHT = 1280, 800  # of the window, in pixels
# Browsers on other machines smooth letters and lines differently.
LEVELS = 32  # difference of a colour value that may result from smoothing
PIXELS = 20  # number of pixels that may differ by more


def predictions() -> tuple[Tensor, Tensor]:
    """Return logits that are too large by a factor of two, and targets."""
    g = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(5000, 10, generator=g, dtype=torch.float64)
    target = torch.multinomial(logits.softmax(-1), 1, generator=g).squeeze(-1)
    return 2 * logits, target


def screenshot(page: Path, browser: str) -> Image.Image:
    """Return the first screen of a page, with as many colours as a PNG file with a palette holds."""
    path = page.with_suffix(".png")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1"]
    options += ["--disable-background-networking", "--no-first-run", f"--user-data-dir={page.parent / 'profile'}"]
    window = [f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={path}"]
    done = subprocess.run([browser, *options, *window, page.as_uri()], capture_output=True, timeout=120, check=False)
    if done.returncode or not path.is_file():
        raise RuntimeError(f"{browser} took no picture.\n{done.stderr.decode(errors='replace')}")
    with Image.open(path) as taken:
        return taken.convert("RGB").quantize(256, dither=Image.Dither.NONE)


def is_same(before: Path, now: Image.Image) -> bool:
    """Return whether a file shows the same picture, except for the smoothing of letters and lines."""
    if not before.is_file():
        return False
    with Image.open(before) as opened:
        old, new = (np.asarray(picture.convert("RGB"), dtype=np.int16) for picture in (opened, now))
    return old.shape == new.shape and int((np.abs(old - new).max(-1) > LEVELS).sum()) <= PIXELS


def main() -> None:
    """Take the picture, and replace the file if the picture has changed."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not browser:
        print(f"{PICTURE.name} was not drawn again: Chromium is not on the PATH")
        return
    logits, target = predictions()
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        page = Path(folder, "report.html")
        torchcalib.report(logits, target, task="multiclass", from_logits=True).save(page)
        picture = screenshot(page, browser)
    if is_same(PICTURE, picture):
        print(f"{PICTURE.name} is up to date")
    else:
        picture.save(PICTURE, optimize=True)
        print(f"{PICTURE.name} was replaced, because the page has changed")


if __name__ == "__main__":
    main()
