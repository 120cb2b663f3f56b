"""Draws docs/architecture.svg: the rooms of the package, in their layers, with the imports between them as arrows.

    python scripts/docs/architecture.py            # draw
    python scripts/docs/architecture.py --check    # exit status 1 if the committed picture is out of date

Rooms and arrows come from the sources, the order of the layers from the contract of import-linter in pyproject.toml. A
room imports to the right and downwards: from its box along the row to a dot, and from the dot down to what it imports.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "finetune"
PICTURE = Path("docs/architecture.svg")
TOLERANCE = 0.1  # of a room's lines: so much may they move before the picture has to be drawn again

# Pixels.
BOX_WIDTH, BOX_HEIGHT, STEP_X, STEP_Y, MARGIN = 150, 46, 74, 64, 24
GROUP_PADDING = 7
LEGEND = "A room imports what is below a dot of its row. Bars: lines of code."
STYLE = """
  .page { fill: #ffffff } .box { fill: #eef3fb; stroke: #3d5a8a; stroke-width: 1.2 } .bar { fill: #b7c9e6 }
  .group { fill: none; stroke: #9aa7bb; stroke-dasharray: 4 3 }
  .arrow { fill: none; stroke: #7d8ba1; stroke-width: 1.1 } .dot { fill: #3d5a8a }
  .up { stroke: #c0392b } .up.dot { fill: #c0392b }
  text { font-family: "Segoe UI", Helvetica, Arial, "DejaVu Sans", sans-serif; font-size: 11px; fill: #1f2a3c }
  .name { font-weight: 600; font-size: 13px } .note { fill: #56637a } .left { text-anchor: end }
"""


@dataclass(frozen=True)
class Room:
    name: str
    layer: int  # 0 on top
    files: int
    lines: int
    packages: tuple[str, ...]  # inside it


@dataclass(frozen=True)
class Arrow:
    importer: str
    imported: str
    modules: int  # pairs of a file that imports and a module that it imports


@dataclass(frozen=True)
class Architecture:
    rooms: tuple[Room, ...]
    arrows: tuple[Arrow, ...]


def layers(root: Path) -> list[list[str]]:
    """Names of the rooms in each layer, from the top, by the contract in pyproject.toml."""
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    contract = re.search(r"^layers = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    if contract is None:
        raise SystemExit("pyproject.toml has no import-linter contract with `layers`")
    rows = re.findall(r'"([^"]+)"', contract.group(1))
    return [[name.strip().removeprefix(f"{PACKAGE}.") for name in re.split(r"[|:]", row)] for row in rows]


def read(root: Path) -> Architecture:
    """The package as it is. Rooms that no layer names are put below the others."""
    sources: dict[str, list[Path]] = {}
    for file in sorted((root / PACKAGE).rglob("*.py")):
        if room := _room(_module(root, file)):
            sources.setdefault(room, []).append(file)
    order = [[name for name in layer if name in sources] for layer in layers(root)]
    order = [layer for layer in order if layer]
    listed = {name for layer in order for name in layer}
    order += [[name] for name in sorted(sources.keys() - listed)]
    rooms, pairs = [], Counter()
    for layer, names in enumerate(order):
        for name in names:
            texts = {file: file.read_text(encoding="utf-8") for file in sources[name]}
            inner = {file.relative_to(root / PACKAGE / name).parts[0] for file in texts if _depth(root, file) > 2}
            lines = sum(len(text.splitlines()) for text in texts.values())
            rooms.append(Room(name, layer, len(texts), lines, tuple(sorted(inner))))
            for file, text in texts.items():
                modules = imported_modules(ast.parse(text), _module(root, file), file.name == "__init__.py")
                reached = {module: _room(module) for module in modules}
                pairs.update((name, room) for room in reached.values() if room in sources and room != name)
    return Architecture(tuple(rooms), tuple(Arrow(*ends, pairs[ends]) for ends in sorted(pairs)))


def _module(root: Path, file: Path) -> str:
    """`finetune/data/batch.py` -> `finetune.data.batch`."""
    return ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def _depth(root: Path, file: Path) -> int:
    """Folders between the package and the file, plus one; 2: in a room itself."""
    return len(file.relative_to(root / PACKAGE).parts)


def _room(module: str) -> str | None:
    """The room of a module; None for the package itself and what starts it."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == PACKAGE and not parts[1].startswith("__") else None


def imported_modules(tree: ast.Module, module: str, is_package: bool) -> set[str]:
    """Modules that a file imports, at its top or in a function; `from finetune import errors` is one of the room."""
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: None if is_package and node.level == 1 else is_package - node.level]
            base = ".".join([*(parents if node.level else []), *([node.module] if node.module else [])])
            imported |= {f"{base}.{alias.name}" for alias in node.names} if base == PACKAGE else {base}
    return imported


def draw(architecture: Architecture) -> str:
    """The picture as SVG, with its numbers in a comment."""
    rooms = architecture.rooms
    place = {room.name: number for number, room in enumerate(rooms)}
    width = 2 * MARGIN + STEP_X * (len(rooms) - 1) + BOX_WIDTH
    height = 2 * MARGIN + STEP_Y * (len(rooms) - 1) + BOX_HEIGHT
    most = max(room.lines for room in rooms)
    ends = {(place[arrow.importer], place[arrow.imported]): arrow for arrow in architecture.arrows}
    parts = [*_groups(rooms), *_lines(list(ends)), *(_dot(arrow, *pair) for pair, arrow in ends.items())]
    for number, room in enumerate(rooms):
        parts += _box(room, number, most)
    parts.append(f'<text class="note" x="{MARGIN}" y="{height - MARGIN}">{LEGEND}</text>')
    body = "\n".join(parts)
    numbers = json.dumps(asdict(architecture))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="The rooms of {PACKAGE} and their imports">\n'
        f"<!-- python scripts/docs/architecture.py {numbers} -->\n"
        f'<style>{STYLE}</style>\n<rect class="page" width="{width}" height="{height}"/>\n'
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#7d8ba1"/></marker></defs>\n'
        f"{body}\n</svg>\n"
    )


def _corner(number: int) -> tuple[int, int]:
    """Left and top of a room's box."""
    return MARGIN + STEP_X * number, MARGIN + STEP_Y * number


def _box(room: Room, number: int, most: int) -> list[str]:
    x, y = _corner(number)
    bar = round((BOX_WIDTH - 2) * room.lines / most)
    size = f"{room.files} files, {room.lines:,} lines" if room.files > 1 else f"{room.lines:,} lines"
    return [
        f'<rect class="box" x="{x}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="4"/>',
        f'<rect class="bar" x="{x + 1}" y="{y + BOX_HEIGHT - 5}" width="{bar}" height="4"/>',
        f'<text class="name" x="{x + 9}" y="{y + 18}">{escape(room.name)}</text>',
        f'<text class="note" x="{x + 9}" y="{y + 34}">{size}</text>',
        f'<text class="note left" x="{x - 12}" y="{y + 27}">{escape(" · ".join(room.packages))}</text>',
    ]


def _groups(rooms: tuple[Room, ...]) -> list[str]:
    """A frame around the rooms of a layer that has several."""
    frames = []
    for layer in sorted({room.layer for room in rooms}):
        numbers = [number for number, room in enumerate(rooms) if room.layer == layer]
        (x, y), (right, bottom) = _corner(numbers[0]), _corner(numbers[-1])
        if len(numbers) > 1:
            wide, high = right - x + BOX_WIDTH + 2 * GROUP_PADDING, bottom - y + BOX_HEIGHT + 2 * GROUP_PADDING
            corner = f'x="{x - GROUP_PADDING}" y="{y - GROUP_PADDING}"'
            frames.append(f'<rect class="group" {corner} width="{wide}" height="{high}" rx="7"/>')
    return frames


def _lines(pairs: list[tuple[int, int]]) -> list[str]:
    """One line along each importer's row, one into each imported room; those against the layers upwards, in red."""
    paths = []
    for down in (True, False):
        kind = "" if down else " up"
        chosen = [(importer, imported) for importer, imported in pairs if (imported > importer) == down]
        for importer in sorted({importer for importer, _ in chosen}):
            bends = [_bend(*pair)[0] for pair in chosen if pair[0] == importer]
            (x, _), (_, row) = _corner(importer), _bend(importer, importer)
            path = f"M{x + BOX_WIDTH} {row}H{max(bends)}" if down else f"M{x} {row}H{min(bends)}"
            paths.append(f'<path class="arrow{kind}" d="{path}"/>')
        for imported in sorted({imported for _, imported in chosen}):
            rows = [_bend(*pair)[1] for pair in chosen if pair[1] == imported]
            x, top = _bend(imported, imported)[0] if down else _corner(imported)[0] + 12, _corner(imported)[1]
            path = f"M{x} {min(rows)}V{top - 1}" if down else f"M{x} {max(rows)}V{top + BOX_HEIGHT + 1}"
            paths.append(f'<path class="arrow{kind}" d="{path}" marker-end="url(#head)"/>')
    return paths


def _bend(importer: int, imported: int) -> tuple[int, int]:
    """Where the row of one room meets the column of another."""
    (_, y), (x, _) = _corner(importer), _corner(imported)
    return x + (BOX_WIDTH - 12 if imported >= importer else 12), y + BOX_HEIGHT // 2


def _dot(arrow: Arrow, importer: int, imported: int) -> str:
    x, y = _bend(importer, imported)
    kind = "dot" if imported > importer else "up dot"
    title = escape(f"{arrow.importer} imports from {arrow.imported}: {arrow.modules}")
    return f'<circle class="{kind}" cx="{x}" cy="{y}" r="{_radius(arrow.modules):.1f}"><title>{title}</title></circle>'


def _radius(modules: int) -> float:
    """Of an arrow's dot: its area grows with what is imported."""
    return min(9.0, 2.0 + 0.6 * modules**0.5)


def problems(committed: str, current: Architecture) -> list[str]:
    """Why the committed picture is not the one of these sources."""
    comment = re.search(r"<!-- python \S+ (.*) -->", committed)
    if comment is None:
        return ["it holds no numbers"]
    values = json.loads(comment.group(1))
    rooms = tuple(Room(**{**room, "packages": tuple(room["packages"])}) for room in values["rooms"])
    drawn = Architecture(rooms, tuple(Arrow(**arrow) for arrow in values["arrows"]))
    if draw(drawn) != committed:
        return ["it was not drawn by this version of the script"]
    differences = []
    shapes = [[(room.name, room.layer, room.packages) for room in one.rooms] for one in (drawn, current)]
    if shapes[0] != shapes[1]:
        differences.append("rooms, their packages or their layers are others")
    before, after = ({(a.importer, a.imported) for a in one.arrows} for one in (drawn, current))
    differences += [f"{importer} -> {imported} is new" for importer, imported in sorted(after - before)]
    differences += [f"{importer} -> {imported} is gone" for importer, imported in sorted(before - after)]
    lines = {room.name: room.lines for room in drawn.rooms}
    moved = (r for r in current.rooms if abs(r.lines - lines.get(r.name, r.lines)) > TOLERANCE * max(r.lines, 100))
    return differences + [f"{room.name} has {room.lines} lines, not {lines[room.name]}" for room in moved]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="whether the committed picture is current")
    arguments = parser.parse_args()
    picture, current = ROOT / PICTURE, read(ROOT)
    if not arguments.check:
        picture.write_text(draw(current), encoding="utf-8")
        return 0
    differences = problems(picture.read_text(encoding="utf-8"), current)
    if differences:
        print(
            f"{PICTURE}: {'; '.join(differences)}. Draw it again: python scripts/docs/architecture.py", file=sys.stderr
        )
    return 1 if differences else 0


if __name__ == "__main__":
    raise SystemExit(main())
