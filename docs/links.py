"""The links of the built documentation: `python docs/links.py SITE`.

Links within the site must lead to a page and an anchor that are there; links that leave it are
listed.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit


class Page(HTMLParser):
    """What one page links to, and what may be linked to in it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = {""}
        self.images: list[dict[str, str | None]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the links and anchors of a tag."""
        found = dict(attrs)
        self.anchors |= {name for key in ("id", "name") if (name := found.get(key))}
        if tag == "img":
            self.images.append(found)
        for key in ("href", "src"):
            if (link := found.get(key)) and tag not in ("link", "script"):
                self.links.append(link)


def pages(site: Path) -> dict[str, Page]:
    """Every page of a site, by its path."""
    return {
        path.relative_to(site).as_posix(): Page(path.read_text())
        for path in sorted(site.rglob("*.html"))
        if path.name != "404.html"
    }


def broken(site: Path) -> list[str]:
    """Links within the site that lead nowhere, a line each."""
    known, found = pages(site), []
    for name, page in known.items():
        for link in page.links:
            if urlsplit(link).scheme or link.startswith("data:"):
                continue
            target = urlsplit(urljoin(f"/{name}", link))
            path = unquote(target.path).removeprefix("/")
            path += "index.html" if not path or path.endswith("/") else ""
            if path in known:
                if unquote(target.fragment) not in known[path].anchors:
                    found.append(f"{name}: no anchor for {link}")
            elif not (site / path).is_file():
                found.append(f"{name}: nothing at {link}")
    return sorted(set(found))


def leaving(site: Path) -> dict[str, list[str]]:
    """Links that leave the site, and the pages that have them."""
    found: dict[str, list[str]] = {}
    for name, page in pages(site).items():
        for link in page.links:
            if urlsplit(link).scheme.startswith("http") and name not in found.setdefault(link, []):
                found[link].append(name)
    return dict(sorted(found.items()))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for link, where in leaving(folder).items():
        print(link, "in", ", ".join(where))
    if lines := broken(folder):
        raise SystemExit("\n".join(["links that lead nowhere:", *lines]))
