"""The text of a PDF, read by pypdf in a process of its own: a file that would take for ever, or all memory, ends there.

That process runs this file by its path, and so imports neither the package nor what it needs.
"""

import asyncio
import importlib.util
import io
import re
import sys
from itertools import pairwise

SECONDS = 60
MEMORY = 2 << 30
NO_TEXT = "no text in it: its pages may be pictures, as of a scan"
MISSING = "A PDF must have pypdf to be read with: pip install pypdf."


def available() -> bool:
    """Tell whether PDFs can be read here."""
    return importlib.util.find_spec("pypdf") is not None


async def read_pdf(data: bytes, seconds: float = SECONDS) -> str:
    """Give the text of a PDF, or raise a ValueError that says why there is none."""
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-P", __file__)
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(seconds):
            text, reason = await process.communicate(data)
    except TimeoutError as error:
        raise ValueError(f"reading it took more than {seconds:g} seconds") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        lines = reason.decode(errors="replace").split("\n") if process.returncode == 3 else []
        raise ValueError(lines[0] if lines else "it is damaged, or no PDF")
    return text.decode()


def flow(text: str) -> str:
    """Join the lines of paragraphs: a line ends one where it is much shorter than the lines are."""
    lines = [line.strip() for line in text.splitlines()]
    lengths = sorted(len(line) for line in lines if line)
    full = 0.75 * lengths[int(0.9 * (len(lengths) - 1))] if lengths else 0
    parts: list[str] = []
    for line, after in pairwise([*lines, ""]):
        if re.search(r"\w-$", line) and after[:1].islower():
            parts.append(line[:-1])
        else:
            parts.append(line + (" " if len(line) >= full and after else "\n"))
    return re.sub(r"\n{3,}", "\n\n", "".join(parts)).strip()


def extract(data: bytes) -> str:
    """Read all pages."""
    from pypdf import PdfReader

    reader = PdfReader(io.BytesIO(data))
    if reader.is_encrypted and not reader.decrypt(""):
        raise ValueError("it is locked with a password")
    text = "\n\n".join(flow(page.extract_text()) for page in reader.pages)
    text = text.encode("utf-8", "replace").decode().strip()
    if not text:
        raise ValueError(NO_TEXT)
    return text


def main() -> None:
    """Read a PDF from standard input and write its text to standard output."""
    import logging

    logging.disable()
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    except (ImportError, ValueError, OSError):  # not everywhere
        pass
    try:
        text = extract(sys.stdin.buffer.read())
    except ValueError as error:
        sys.stderr.write(str(error))
        sys.exit(3)
    except Exception:  # whatever a library makes of a broken file
        sys.exit(4)
    sys.stdout.buffer.write(text.encode())


if __name__ == "__main__":
    main()

__all__ = ["MISSING", "available", "read_pdf"]
