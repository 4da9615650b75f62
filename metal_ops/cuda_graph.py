"""A round's launches on Hopper, each of which starts before the one before it has ended."""

import ctypes

from tinygrad.runtime.autogen import cuda
from tinygrad.runtime.graph.cuda import CUDAGraph
from tinygrad.runtime.ops_cuda import check
from tinygrad.runtime.support.c import init_c_var
from tinygrad.uop.ops import Ops, UOp

from metal_ops.cuda import waits


# In the source of a launch that multiplies many rows.
MANY_ROWS = "#define IS_STAGED 1\n"


class _Edge(ctypes.Structure):
    """CUgraphEdgeData of CUDA's driver."""

    _fields_ = (
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("type", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    )


# When all threadgroups of the launch before have said that the next one may start, or have ended:
# CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC and CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC.
PROGRAMMATIC = _Edge(from_port=1, type=1)


class ChainedGraph(CUDAGraph):
    """Launches in their order, by programmatic dependent launch: a launch is on its multiprocessors,
    and its first weights on their way, by the time that its `wait_for_last_launch` is over.

    Only for launches all of which wait: a graph that has such edges starts others early as well,
    whatever their edges are (measured on an H200).
    """

    def __init__(self, graph: UOp) -> None:
        super().__init__(graph)
        nodes = [node for node, *_ in self.nodes]
        count = len(nodes) - 1
        before, after = ((cuda.CUgraphNode * count)(*ends) for ends in (nodes[:-1], nodes[1:]))
        edges = (_Edge * count)(*[PROGRAMMATIC] * count)
        add = cuda.dll.cuGraphAddDependencies_v2
        check(add(self.graph, before, after, edges, ctypes.c_size_t(count)))
        unchained = self.instance
        self.instance = init_c_var(
            cuda.CUgraphExec,
            lambda made: check(
                cuda.cuGraphInstantiate_v2(ctypes.byref(made), self.graph, None, None, 0)
            ),
        )
        check(cuda.cuGraphExecDestroy(unchained))

    def new_node(self, buffers: list, written: list[int]) -> tuple[None, cuda.CUgraphNode]:
        """A node that depends on none yet."""
        return None, cuda.CUgraphNode()


def can_chain(graph: UOp) -> bool:
    """Whether all launches of a graph wait, none is of many rows, and the driver (of CUDA 12.3 or
    later) knows how.

    Many rows gain nothing, and lose where threadgroups are few: a prompt of 512 takes the 350M's
    shape 1.12x as long (measured on an H200).
    """
    launched = [call.src[0] for call in graph.src[0].src]
    sources = [part.arg for one in launched for part in one.src if part.op is Ops.SOURCE]
    return (
        len(sources) == len(launched)
        and all(waits(source) and MANY_ROWS not in source for source in sources)
        and hasattr(cuda.dll, "cuGraphAddDependencies_v2")
    )
