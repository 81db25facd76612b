"""Makes docs/images/report.png, the beginning of a report as a browser shows it.

python docs/make_report_picture.py            # some minutes; needs chromium
python docs/make_report_picture.py --runs=DIR # a run that is in DIR is not made again
"""

import argparse
import pathlib
import shutil
import subprocess
import sys
import tempfile

from PIL import Image

PICTURE = pathlib.Path(__file__).parent / "images" / "report.png"
COMMAND = "python -m experiments.report --model=gpt2-docs --out=runs/report"
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_SIZE = (900, 1200)  # pixels
_COLOURS = 128


def make_run(root: pathlib.Path) -> pathlib.Path:
    """Returns the page of a run, which is made where it is not there."""
    page = root / "report" / "report.html"
    if not page.is_file():
        subprocess.run([sys.executable, *COMMAND.split()[1:]], cwd=root.parent, check=True)
    return page


def take_picture(page: pathlib.Path) -> Image.Image:
    """Returns the beginning of a page, in few colours.

    Raises:
      FileNotFoundError: there is no browser.
    """
    browser = next((path for path in map(shutil.which, _BROWSERS) if path), None)
    if browser is None:
        raise FileNotFoundError(f"no browser: install one of {', '.join(_BROWSERS)}.")
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "page.png"
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        window = f"--window-size={_SIZE[0]},{_SIZE[1]}"
        command = [browser, *flags, window, f"--screenshot={file}", page.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        return Image.open(file).convert("RGB").quantize(_COLOURS)


def main() -> None:
    """Makes the run and its picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs", type=pathlib.Path, default=pathlib.Path("runs"), help="a folder called runs"
    )
    root = parser.parse_args().runs.resolve()
    if root.name != "runs":
        parser.error(f"--runs={root}: the command writes to a folder called runs.")
    take_picture(make_run(root)).save(PICTURE, optimize=True)


if __name__ == "__main__":
    main()
