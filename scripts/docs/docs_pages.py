"""A hook of mkdocs: pages of the site whose files lie outside docs/, and links that lead out of the site.

README.md is the front page. Links between the pages go on working; one to code, which the site does not have, becomes
the name of the file. For programs that read text, each page lies beside itself as markdown, and llms.txt lists all.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PAGES = {  # file of the repository: page of the site
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Writes a page's markdown beside it."""
    beside = Path(config.site_dir, page.file.dest_uri).with_suffix(".md")
    beside.parent.mkdir(parents=True, exist_ok=True)
    beside.write_text(page.markdown or "", encoding="utf-8")
    return output


def on_post_build(config: MkDocsConfig) -> None:
    """Writes llms.txt (llmstxt.org): the pages in the order of the site, by section."""
    text = f"# {config.site_name}\n\n> {config.site_description}\n" + _listed(config.nav or [], Path(config.site_dir))
    Path(config.site_dir, "llms.txt").write_text(text, encoding="utf-8")


def _listed(entries: list[Any], site: Path, section: str = "") -> str:
    """Returns the pages of a part of `nav` with their titles: its own ahead of those of its sections."""
    own = [entry for entry in entries if isinstance(entry, str)]
    lines = [f"- [{_title(site / page)}]({page})" for page in own]
    text = f"\n## {section}\n\n" + "\n".join(lines) + "\n" if lines else ""
    for entry in entries:
        for name, inner in entry.items() if isinstance(entry, dict) else ():
            text += _listed(inner, site, f"{section}: {name}" if section else name)
    return text


def _title(page: Path) -> str:
    """Returns the first heading of a page."""
    return next(line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("# ")).removeprefix(
        "# "
    )


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Returns a page whose links name pages of the site."""
    sources = {site: source for source, site in PAGES.items()}
    folder = PurePosixPath(sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")).parent

    def link(found: re.Match[str]) -> str:
        text, name, anchor = found.groups(default="")
        path = os.path.normpath(folder / name).replace(os.sep, "/")
        target = PAGES.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        if target is None:
            return text.strip("`").join("``")
        own_folder = PurePosixPath(page.file.src_uri).parent
        return f"[{text}]({os.path.relpath(target, own_folder).replace(os.sep, '/')}{anchor})"

    return re.sub(r"\[([^\]]*)\]\((?!https?://|#)([^)#\s]+)(#[^)\s]*)?\)", link, markdown)
