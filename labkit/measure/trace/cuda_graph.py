"""The launches of a step as MLX's CUDA back end recorded them: the graphs that it writes when it is asked to.

With `MLX_SAVE_CUDA_GRAPHS_DOT_FILE` set, MLX writes every CUDA graph that it instantiates in CUDA's own DOT form: one
node a kernel, copy or fill, one edge a dependency. That is what the device was really given, launches fused or split by
the back end included.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_NODE = re.compile(r'^\s*"?([\w.]+)"?\s*\[(.*)', re.S)
_EDGE = re.compile(r'"?([\w.]+)"?\s*->\s*"?([\w.]+)"?')
_LABEL = re.compile(r'label\s*=\s*"(.*?)(?<!\\)"', re.S)
_EMPTY = ("EMPTY", "EVENT")


@dataclass(frozen=True)
class CudaGraph:
    """One graph: its nodes' names and what each waits for.

    Attributes:
        names: by node. edges: (before, after).
    """

    names: dict[str, str]
    edges: tuple[tuple[str, str], ...]

    @property
    def launches(self) -> int:
        """Nodes that do something."""
        return sum(not _is_empty(name) for name in self.names.values())

    @property
    def stages(self) -> int:
        """Of those, the most on one chain of dependencies.

        Raises:
            ValueError: nodes that wait for each other in a circle.
        """
        after: dict[str, list[str]] = {node: [] for node in self.names}
        waiting = dict.fromkeys(self.names, 0)
        for before, later in self.edges:
            after[before].append(later)
            waiting[later] += 1
        depth = {node: int(not _is_empty(name)) for node, name in self.names.items()}
        ready, done = [node for node, count in waiting.items() if not count], 0
        while ready:
            node = ready.pop()
            done += 1
            for later in after[node]:
                depth[later] = max(depth[later], depth[node] + int(not _is_empty(self.names[later])))
                waiting[later] -= 1
                if not waiting[later]:
                    ready.append(later)
        if done < len(self.names):
            raise ValueError("the graph has nodes that wait for each other in a circle: the file is damaged")
        return max(depth.values(), default=0)

    def by_name(self) -> list[tuple[str, int]]:
        """(name, launches), the most frequent first."""
        counts: dict[str, int] = {}
        for name in self.names.values():
            if not _is_empty(name):
                counts[name] = counts.get(name, 0) + 1
        return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def read_graphs(path: Path) -> list[CudaGraph]:
    """Every graph of a DOT file, in order.

    Raises:
        ValueError: a file without a graph.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    graphs = [_parse(body) for body in re.split(r"^\s*digraph\b", text, flags=re.M)[1:]]
    if not graphs:
        raise ValueError(f"{path} holds no graph: set MLX_SAVE_CUDA_GRAPHS_DOT_FILE before MLX is imported")
    return graphs


def _parse(body: str) -> CudaGraph:
    names: dict[str, str] = {}
    edges: list[tuple[str, str]] = []
    for statement in _statements(body):
        if edge := _EDGE.search(statement.split("[")[0]):
            edges.append((edge[1], edge[2]))
        elif (node := _NODE.match(statement)) and node[1] not in ("graph", "node", "edge", "subgraph"):
            names[node[1]] = _name(node[2])
    for before, after in edges:
        names.setdefault(before, "EMPTY")
        names.setdefault(after, "EMPTY")
    return CudaGraph(names, tuple(edges))


def _statements(body: str) -> list[str]:
    """A graph's statements; strings may hold line breaks and semicolons, so they are put aside first."""
    strings: list[str] = []

    def put_aside(match: re.Match) -> str:
        strings.append(match[0])
        return f"\0{len(strings) - 1}\0"

    bare = re.split(r"[;{}\n]", re.sub(r'"(?:[^"\\]|\\.)*"', put_aside, body))
    put_back = lambda match: strings[int(match[1])]
    return [re.sub("\0(\\d+)\0", put_back, statement) for statement in bare if statement.strip()]


def _name(attributes: str) -> str:
    """A node's kernel, from its label: the line with the longest word in it, without numbers and braces."""
    label = _LABEL.search(attributes)
    if label is None:
        return "EMPTY"
    lines = re.split(r"\\n|\n|\||\\[{}]|[{}]", label[1])
    words = [line.strip() for line in lines if re.search(r"[A-Za-z_]{3}", line)]
    kinds = [word for word in words if word.split()[0] in ("MEMCPY", "MEMSET", "EMPTY", "EVENT", "HOST", "KERNEL")]
    named = [word for word in words if word not in kinds]
    if kinds and kinds[0].split()[0] not in ("KERNEL",):
        return kinds[0].split()[0]
    return max(named or words or ["EMPTY"], key=len)


def _is_empty(name: str) -> bool:
    return name.startswith(_EMPTY)
