"""Make links from the pages to files of the repository work in the built site.

Pages link to files outside docs/, such as ../results/toy/README.md, so that the links also work in a checkout. Each of
these files becomes part of the site under source/: Markdown as a page, everything else as it is.
"""

from __future__ import annotations

import os
import pathlib
import posixpath
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?:(?<=\]\()|(?<=\]: ))([^)#\s\[]+)(#[^)\s]*)?(?=[)\s])")


def repository_path(page: str, link: str) -> str | None:
    """Path in the repository of a relative link of `page`, itself a path in the repository; None for other links."""
    if "://" in link or link.startswith(("mailto:", "/")):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    return path if (ROOT / path).exists() else None


def site_path(path: str) -> str:
    """Where a file of the repository is in the site."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that pages link to, and those that these link to in turn."""
    pending = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    seen = set(pending)
    while pending:
        page = pending.pop()
        for link, _ in LINK.findall((ROOT / page).read_text()):
            target = repository_path(page, link)
            if target is None or target in seen or target.startswith("docs/") or (ROOT / target).is_dir():
                continue
            seen.add(target)
            files.append(File.generated(config, site_path(target), abs_src_path=str(ROOT / target)))
            if target.endswith(".md"):
                pending.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to files of the repository at their places in the site."""
    here = page.file.src_uri
    source = here.removeprefix("source/") if here.startswith("source/") else f"docs/{here}"

    def replace(match: re.Match) -> str:
        target = repository_path(source, match[1])
        if target is None or files.get_file_from_path(site_path(target)) is None:
            return match[0]
        return os.path.relpath(site_path(target), posixpath.dirname(here) or ".") + (match[2] or "")

    return LINK.sub(replace, markdown)
