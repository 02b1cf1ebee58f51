"""What part of a world an observation covers, so that two of them can be compared."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cells:
    """Named places of a world that is no picture (a cupboard, a cell of a grid)."""

    names: frozenset[str]


@dataclass(frozen=True)
class Box:
    """A rectangle of a page, in the page's own pixels: left and top are inside, right and bottom outside."""

    page: str
    left: int
    top: int
    right: int
    bottom: int

    @property
    def area(self) -> int:
        return max(0, self.right - self.left) * max(0, self.bottom - self.top)


Region = Cells | Box


def overlap(one: Region, other: Region) -> float:
    """Intersection over union, in [0, 1]; 0 for regions of different kinds, pages or of no size."""
    if isinstance(one, Cells) and isinstance(other, Cells):
        union = one.names | other.names
        return len(one.names & other.names) / len(union) if union else 0.0
    if isinstance(one, Box) and isinstance(other, Box) and one.page == other.page:
        width = min(one.right, other.right) - max(one.left, other.left)
        height = min(one.bottom, other.bottom) - max(one.top, other.top)
        shared = max(0, width) * max(0, height)
        union_area = one.area + other.area - shared
        return shared / union_area if union_area else 0.0
    return 0.0
