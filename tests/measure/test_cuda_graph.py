"""CUDA's own graphs, read from DOT: planted ones whose launches and stages are known."""

import pytest

from labkit.measure.trace.cuda_graph import read_graphs

PLANTED = """digraph dot {
subgraph cluster_1 {
label="graph_1" graph[style="dashed"];
"graph_1_node_0"[style="solid" shape="rectangle" label="0
MEMSET
"];
"graph_1_node_1"[style="bold" shape="octagon" label="1
custom_kernel_decode_gate_up; variant
<<<16,256>>>"];
"graph_1_node_2"[style="bold" shape="octagon" label="2
custom_kernel_decode_gate_up; variant
<<<16,256>>>"];
"graph_1_node_3"[style="solid" shape="oval" label="3
EMPTY
"];
"graph_1_node_4"[style="bold" shape="octagon" label="4
custom_kernel_decode_down
<<<16,256>>>"];
"graph_1_node_0" -> "graph_1_node_1";
"graph_1_node_0" -> "graph_1_node_2";
"graph_1_node_1" -> "graph_1_node_3";
"graph_1_node_2" -> "graph_1_node_3";
"graph_1_node_3" -> "graph_1_node_4";
}
}
digraph dot {
a [label="one_kernel"]
b [label="another_kernel"]
a -> b
}
"""


@pytest.fixture
def graphs(tmp_path):
    path = tmp_path / "graphs.dot"
    path.write_text(PLANTED)
    return read_graphs(path)


def test_launches_and_stages_without_the_empty_nodes(graphs):
    first, second = graphs
    assert (first.launches, first.stages) == (4, 3)
    assert (second.launches, second.stages) == (2, 2)


def test_kernels_keep_their_names(graphs):
    names = dict(graphs[0].by_name())
    assert names["custom_kernel_decode_gate_up; variant"] == 2
    assert names["custom_kernel_decode_down"] == 1
    assert names["MEMSET"] == 1
    assert [name for name, _ in graphs[1].by_name()] == ["another_kernel", "one_kernel"]


def test_files_without_a_graph_and_circles_are_refused(tmp_path):
    path = tmp_path / "x.dot"
    path.write_text("nothing here")
    with pytest.raises(ValueError, match="MLX_SAVE_CUDA_GRAPHS_DOT_FILE"):
        read_graphs(path)
    path.write_text('digraph dot {\n"a"[label="kernel_a"];\n"b"[label="kernel_b"];\n"a" -> "b";\n"b" -> "a";\n}')
    with pytest.raises(ValueError, match="circle"):
        _ = read_graphs(path)[0].stages


def test_the_command_counts_and_refuses(tmp_path):
    import json

    from typer.testing import CliRunner

    from labkit.measure.trace.commands import app

    (tmp_path / "graphs.dot").write_text(PLANTED)
    result = CliRunner().invoke(app, ["cuda-graph", str(tmp_path / "graphs.dot"), "--json"])
    assert json.loads(result.stdout)["graphs"][0] == {"graph": 0, "launches": 4, "stages": 3}
    assert CliRunner().invoke(app, ["cuda-graph", str(tmp_path / "missing.dot")]).exit_code == 2
