"""The tree of chains that this engine knows: which block follows which, and where states are kept."""

from __future__ import annotations

from dataclasses import dataclass, field

from labkit.engine.prefix.retention import Snapshot


@dataclass
class Node:
    """One block. `depth` counts blocks from the root (the first is 1)."""

    key: str
    parent: str
    depth: int
    children: set[str] = field(default_factory=set)
    used: int = 0
    forked: bool = False  # a prompt went another way behind this block
    columns: bool = True  # as far as by-token layers are concerned, it may be there
    state_bytes: int = 0  # 0: no state is kept here


class Tree:
    """Blocks by key. Not locked: the store's lock guards it."""

    def __init__(self) -> None:
        self._nodes: dict[str, Node] = {}
        self._clock = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, key: str) -> Node | None:
        """The block, if it is known."""
        return self._nodes.get(key)

    def add(self, chain: list[str], root: str) -> Node:
        """Make every block of a chain known, and used now; returns the last."""
        self._clock += 1
        parent, node = root, None
        for depth, key in enumerate(chain, 1):
            node = self._nodes.get(key)
            if node is None:
                node = self._nodes[key] = Node(key, parent, depth)
                if parent in self._nodes:
                    self._nodes[parent].children.add(key)
            node.used = self._clock
            parent = key
        return node

    def learn(self, headers: dict[str, dict[str, str]]) -> None:
        """What an earlier process left: record names -> what the records say of themselves."""
        for about in headers.values():
            if about["part"] in ("columns", "state"):
                node = self._nodes.setdefault(about["key"], Node(about["key"], about["parent"], int(about["depth"])))
                if about["part"] == "state":
                    node.state_bytes = int(about["bytes"])
                else:
                    node.columns = True
        for node in self._nodes.values():
            if node.parent in self._nodes:
                self._nodes[node.parent].children.add(node.key)

    def mark_fork(self, key: str) -> None:
        """Prompts part behind this block."""
        if key in self._nodes:
            self._nodes[key].forked = True

    def gone(self, name: str) -> None:
        """A record is in no tier any more."""
        key, _, part = name.partition(".")
        if (node := self._nodes.get(key)) is None:
            return
        if part == "state":
            node.state_bytes = 0
        elif part == "columns":
            node.columns = False
        if not node.state_bytes and not node.columns:
            del self._nodes[key]
            if node.parent in self._nodes:
                self._nodes[node.parent].children.discard(key)

    @property
    def state_bytes(self) -> int:
        """Bytes of all states that are kept."""
        return sum(node.state_bytes for node in self._nodes.values())

    def snapshots(self) -> list[Snapshot]:
        """Every state that is kept, with what a policy wants to know of it."""
        continued: set[str] = set()  # blocks with a state somewhere behind them
        for node in sorted(self._nodes.values(), key=lambda node: -node.depth):
            if node.state_bytes or node.key in continued:
                continued.add(node.parent)
        return [
            Snapshot(
                key=node.key,
                depth=node.depth,
                newest=node.key not in continued,
                branching=node.forked or len(node.children) > 1,
                used=node.used,
                nbytes=node.state_bytes,
            )
            for node in self._nodes.values()
            if node.state_bytes
        ]
