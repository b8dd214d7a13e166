"""A compiler pass: the gathers of a block become one, and so do its scatters.

What torch.compile hands a backend is a graph: a list of nodes, each an operator with the nodes that it reads.
A pass goes through the list and writes another one that computes the same. DTensor plans for one parameter at
a time, and so the list has a collective for each. This pass finds those that move the same way along the same
axis for parameters of one block, and puts one in their place:

    all_gather(a), all_gather(b)          -> all_gather(a ++ b), and a cut of what arrives
    reduce_scatter(a), reduce_scatter(b)  -> reduce_scatter(a ++ b), and a cut

The bytes stay what they were. A gather moves up to the block's first: what it reads are shards, which are
there from the start. A scatter moves down to the block's last: what it gives are gradients, which nothing in
the graph reads. The graph is the joint one, of forward and backward, before they are parted: so backward
gathers again what forward gathered, and once a block. A forward alone, as of an evaluation, stays as it is.

Source: SimpleFSDP (arXiv 2411.00284), whose passes merge by a model of costs, and reorder, too.
"""

import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_c10d, _aten = torch.ops._c10d_functional, torch.ops.aten
_GATHER, _SCATTER = _c10d.all_gather_into_tensor.default, _c10d.reduce_scatter_tensor.default
_WAIT = _c10d.wait_tensor.default
PRIMALS = "primals"
"""What names of forward's inputs begin with in a joint graph; those of gradients that come in are others."""
_BLOCK = re.compile(r"_modules_h_modules_(\d+)_")
"""Number of a block in the name that Dynamo gives a parameter."""


def merging_backend(graph: GraphModule, inputs: Sequence[Any]) -> Any:
    """Compile what Dynamo traced: merge its collectives, then run it operator by operator, as aot_eager."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    names = [str(node.target) for node in graph.graph.nodes if node.op == "placeholder"]
    flat = [name for name, x in zip(names, inputs, strict=True) for _ in range(_flat_inputs(x))]
    blocks = {at: found[1] for at, name in enumerate(flat) if (found := _BLOCK.search(name))}

    def part(joint: GraphModule, arguments: Sequence[Any], **options: Any) -> tuple[GraphModule, GraphModule]:
        merge(joint.graph, blocks)
        joint.recompile()
        return min_cut_rematerialization_partition(joint, arguments, **options)

    compiled = aot_autograd(
        fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=part, keep_inference_input_mutations=True
    )
    return compiled(graph, inputs)


def _flat_inputs(x: Any) -> int:
    """How many inputs of the joint graph stand for one of Dynamo's: a DTensor is its parts."""
    return len(x.__tensor_flatten__()[0]) if is_traceable_wrapper_subclass(x) else 1


def merge(graph: Graph, blocks: Mapping[int, str]) -> None:
    """Put one gather and one scatter in the place of a block's.

    Args:
        graph: the joint one; its first inputs are those of forward, in order.
        blocks: of which block the inputs are that are parameters, by their number.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder" and node.name.startswith(PRIMALS)]
    of_input = {inputs[at]: block for at, block in blocks.items()}
    (returned,) = (node for node in graph.nodes if node.op == "output")
    gathers: dict[tuple, list[Node]] = {}
    scatters: dict[tuple, list[Node]] = {}
    for node in graph.nodes:
        if node.target is _GATHER and (block := _one({of_input.get(n) for n in _inputs(node)})):
            gathers.setdefault((block, node.args[1:], _dtype(node)), []).append(node)
        elif node.target is _SCATTER and (block := _block_of_gradient(node, returned, inputs, of_input)):
            scatters.setdefault((block, node.args[1:], _dtype(node)), []).append(node)
    for nodes in gathers.values():
        _merge_gathers(graph, nodes)
    for nodes in scatters.values():
        _merge_scatters(graph, nodes)
    graph.lint()


def _merge_gathers(graph: Graph, nodes: Sequence[Node]) -> None:
    """(n, ..) shards of R ranks each -> one gather, cut into (R n, ..)."""
    first, ranks, group = nodes[0], *nodes[0].args[1:]
    for node in nodes[1:]:
        _move_before(first, node.all_input_nodes)
    with graph.inserting_before(first):
        call = partial(_call, graph, like=first)
        flat = call(_aten.cat.default, [call(_aten.reshape.default, n.args[0], [-1]) for n in nodes])
        whole = call(_WAIT, call(_GATHER, flat, ranks, group))
        sizes = [_value(node.args[0]).numel() for node in nodes]
        by_rank = call(_aten.reshape.default, whole, [ranks, -1])
        parts = call(_aten.split_with_sizes.default, by_rank, sizes, 1)
        made = [
            call(_aten.reshape.default, _item(graph, parts, at), list(_value(node).shape))
            for at, node in enumerate(nodes)
        ]
    for node, part in zip(nodes, made, strict=True):
        (wait,) = node.users
        _replace(graph, node, wait, part)


def _merge_scatters(graph: Graph, nodes: Sequence[Node]) -> None:
    """(R n, ..) sums to be made over R ranks -> one scatter, cut into (n, ..)."""
    last, (how, ranks, group) = nodes[-1], nodes[-1].args[1:]
    with graph.inserting_before(last.next):
        call = partial(_call, graph, like=last)
        rows = [call(_aten.reshape.default, node.args[0], [ranks, -1]) for node in nodes]
        flat = call(_aten.reshape.default, call(_aten.cat.default, rows, 1), [-1])
        own = call(_WAIT, call(_SCATTER, flat, how, ranks, group))
        shapes = [list(_value(node).shape) for node in nodes]
        parts = call(_aten.split_with_sizes.default, own, [math.prod(shape) for shape in shapes])
        made = [
            call(_aten.reshape.default, _item(graph, parts, at), shape) for at, shape in enumerate(shapes)
        ]
    for node, part in zip(nodes, made, strict=True):
        (wait,) = node.users
        _move_after(made[-1], wait)
        _replace(graph, node, wait, part)


def _replace(graph: Graph, node: Node, wait: Node, by: Node) -> None:
    wait.replace_all_uses_with(by)
    graph.erase_node(wait)
    graph.erase_node(node)


def _move_before(place: Node, nodes: Iterable[Node]) -> None:
    """Nodes, and what they read, come before a place, if they do not yet."""
    for node in nodes:
        if node.op != "placeholder" and not node < place:
            _move_before(place, node.all_input_nodes)
            place.prepend(node)


def _move_after(place: Node, node: Node) -> None:
    """What reads a node, and what reads that, comes after a place, if it does not yet."""
    for user in list(node.users):
        if user.op != "output" and user < place:
            _move_after(place, user)
            place.append(user)


def _call(graph: Graph, does: Any, *arguments: Any, like: Node) -> Node:
    """A new node, with the value that it has on fake tensors, and what else a node says of itself."""
    node = graph.call_function(does, arguments)
    node.meta = {key: value for key, value in like.meta.items() if key not in ("val", "tensor_meta")}
    with _value(like).fake_mode:
        node.meta["val"] = does(*map_arg(arguments, _value))
    return node


def _item(graph: Graph, several: Node, at: int) -> Node:
    node = graph.call_function(operator.getitem, (several, at))
    node.meta = {**several.meta, "val": _value(several)[at]}
    return node


def _value(node: Any) -> Any:
    return node.meta["val"]


def _dtype(node: Node) -> torch.dtype:
    return _value(node).dtype


def _inputs(node: Node) -> set[Node]:
    """The graph's inputs that a node is made of."""
    seen: set[Node] = set()
    open_nodes = [node]
    while open_nodes:
        one = open_nodes.pop()
        if one not in seen:
            seen.add(one)
            open_nodes += one.all_input_nodes
    return {one for one in seen if one.op == "placeholder"}


def _block_of_gradient(
    node: Node, returned: Node, inputs: Sequence[Node], of_input: Mapping[Node, str]
) -> str | None:
    """The block of the parameter whose gradient a scatter's result is."""
    made_of_all: Any = returned.args[0]
    gradients = made_of_all[-len(inputs) :]
    (wait,) = node.users
    reached, open_nodes = set(), [wait]
    while open_nodes:
        one = open_nodes.pop()
        reached.add(one)
        open_nodes += [user for user in one.users if user.op != "output" and user not in reached]
    return _one({of_input.get(of) for of, made in zip(inputs, gradients, strict=False) if made in reached})


def _one(found: set[str | None]) -> str | None:
    return found.pop() if len(found) == 1 else None
