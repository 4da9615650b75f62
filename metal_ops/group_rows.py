"""group_rows: the pairs (row, choice) of a round, grouped by the expert chosen.

    lists = (how many experts have pairs; those experts; of each the first place and the number of
    its pairs; the pairs)

chosen (T, A) int32; a pair is row * A + choice. `Lists` says where what is.
"""

from dataclasses import dataclass

from tinygrad import Tensor, dtypes

from metal_ops.kernel import SIMD_WIDTH, Argument, Kernel, compose, has_kernels
from metal_ops.launch import inject
from metal_ops.loops import Array, Loops, loop_kernel

MAX_SIMDGROUPS = 16
# A SIMD-group of group_rows counts the pairs of its experts in registers, two for each.
MAX_EXPERTS = 256


@dataclass(frozen=True)
class Lists:
    """The layout of the pairs grouped by expert, (2 + 3 E + T A) int32.

    How many experts have pairs; which they are, in order; of each of those, where among the pairs
    its first one is; of each, how many it has; the pairs, in order within an expert; a spare place.
    """

    num_experts: int
    num_pairs: int

    @property
    def experts_offset(self) -> int:
        return 1

    @property
    def firsts_offset(self) -> int:
        return self.experts_offset + self.num_experts

    @property
    def counts_offset(self) -> int:
        return self.firsts_offset + self.num_experts

    @property
    def pairs_offset(self) -> int:
        return self.counts_offset + self.num_experts

    @property
    def argument(self) -> Argument:
        return Argument("lists", (self.pairs_offset + self.num_pairs + 1,), dtypes.int32)

    @property
    def constants(self) -> dict[str, int]:
        """What the texts of the kernels need to know of the layout."""
        return {
            "EXPERTS_OFFSET": self.experts_offset,
            "FIRSTS_OFFSET": self.firsts_offset,
            "COUNTS_OFFSET": self.counts_offset,
            "PAIRS_OFFSET": self.pairs_offset,
        }

    @property
    def most_used(self) -> int:
        """How many experts may have pairs."""
        return min(self.num_experts, self.num_pairs)


def group_rows(chosen: Tensor, num_experts: int) -> Tensor:
    """The pairs (row, choice) grouped by expert, as `Lists` lays them out.

    What lies beyond the experts that have pairs, and the spare place, may hold anything.
    """
    kernel = None
    if has_kernels(chosen.device):
        kernel = group_rows_kernel(*chosen.shape, num_experts)
    if kernel is None:
        return reference(chosen, num_experts)
    return inject(kernel, [chosen])[0]


def group_rows_kernel(num_rows: int, num_active: int, num_experts: int) -> Kernel | None:
    """The kernel for these shapes: up to 256 experts."""
    if num_experts > MAX_EXPERTS:
        return None
    lists = Lists(num_experts, num_rows * num_active)
    chosen = Argument("chosen", (num_rows, num_active), dtypes.int32)
    threads = SIMD_WIDTH * min(MAX_SIMDGROUPS, num_experts)
    name = f"group_rows_{num_rows}x{num_active}_{num_experts}"
    source = compose(
        ("group_rows",),
        "group_rows",
        name,
        NUM_PAIRS=lists.num_pairs,
        NUM_EXPERTS=num_experts,
        THREADS=threads,
        **lists.constants,
    )
    return Kernel(
        name,
        source,
        (1, 1, 1),
        threads,
        (lists.argument,),
        (chosen,),
        num_ops=2 * lists.num_pairs * num_experts,
        num_bytes=chosen.num_bytes + lists.argument.num_bytes,
    )


def reference(chosen: Tensor, num_experts: int) -> Tensor:
    num_pairs = chosen.shape[0] * chosen.shape[1]
    flat = chosen.reshape(num_pairs)
    layout = Lists(num_experts, num_pairs)

    def body(loops: Loops, lists: Array, chosen: Array) -> None:
        num_used = loops.local(1, dtype=dtypes.int32)
        num_listed = loops.local(1, dtype=dtypes.int32)
        num_used[0] = 0
        num_listed[0] = 0
        with loops.over(num_experts) as e:
            first = loops.keep(num_listed, 0)
            with loops.over(num_pairs) as pair:
                # Written always, but only a pair of this expert moves the count past what was
                # written.
                place = layout.pairs_offset + num_listed[0].cast(dtypes.weakint)
                lists[place] = pair.cast(dtypes.int32)
                num_listed[0] = num_listed[0] + chosen[pair].cast(dtypes.weakint).eq(e).cast(
                    dtypes.int32
                )
            used = num_used[0].cast(dtypes.weakint)
            lists[layout.experts_offset + used] = e.cast(dtypes.int32)
            lists[layout.firsts_offset + used] = first
            lists[layout.counts_offset + used] = num_listed[0] - first
            num_used[0] = num_used[0] + (num_listed[0] > first).cast(dtypes.int32)
        lists[0] = num_used[0]

    lists = Tensor.empty(*layout.argument.shape, dtype=dtypes.int32, device=chosen.device)
    return loop_kernel(f"group_rows_{num_pairs}_{num_experts}", body, [lists], [flat])[0]
