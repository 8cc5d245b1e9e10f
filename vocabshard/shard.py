"""VocabShard: the one description of a rank's share of the vocabulary."""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from torch import Tensor

from vocabshard.contract import TILE
from vocabshard.dist import agree
from vocabshard.dist.gather import gather_objects, rank_and_size

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_numbers = itertools.count(1)
_labelled: weakref.WeakValueDictionary[str, VocabShard] = weakref.WeakValueDictionary()


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, eq=False)
class VocabShard:
    """Columns [start, stop) of a padded vocabulary, of which ids below real_vocab_size exist.

    Making one is a collective on `group` (one object all-gather): all ranks learn all ranges and either all get the
    shard or all get the same ValueError (ranges that do not follow each other in group-rank order from 0 to
    padded_vocab_size, sizes that differ). `group=None` is this process alone and must cover everything.

    Attributes: ranges, the (start, stop) of every rank; rank and world_size in the group.
    """

    start: int
    stop: int
    real_vocab_size: int
    padded_vocab_size: int
    group: ProcessGroup | None = None
    ranges: tuple[tuple[int, int], ...] = field(init=False)
    rank: int = field(init=False)
    world_size: int = field(init=False)
    label: str = field(init=False, repr=False)  # names it among the shards of this process
    _seen: list[bool] = field(init=False, repr=False)  # whether the first use has been agreed
    plans: dict[Any, Any] = field(init=False, repr=False)  # of calls that named it (remembered.py)

    def __post_init__(self) -> None:
        rank, world_size = rank_and_size(self.group)
        error: Exception | None = None
        try:
            self._check_own()
        except (TypeError, ValueError) as e:
            error = e
        agree.raise_together(error, self.group)
        sizes = {"real_vocab_size": self.real_vocab_size, "padded_vocab_size": self.padded_vocab_size}
        described = gather_objects((self.start, self.stop, sizes), self.group)
        agree.compare([d[2] for d in described], "give every rank the same sizes")
        ranges = tuple((start, stop) for start, stop, _ in described)
        _check_cover(ranges, self.padded_vocab_size)
        object.__setattr__(self, "ranges", ranges)
        object.__setattr__(self, "rank", rank)
        object.__setattr__(self, "world_size", world_size)
        object.__setattr__(self, "_seen", [False])
        object.__setattr__(self, "plans", {})
        object.__setattr__(self, "label", f"shard {next(_numbers)}")
        _labelled[self.label] = self

    def _check_own(self) -> None:
        for name in ("start", "stop", "real_vocab_size", "padded_vocab_size"):
            value = getattr(self, name)
            if not _is_int(value):
                raise TypeError(f"VocabShard: {name} must be an int, got {value!r}")
        if not 0 <= self.start <= self.stop <= self.padded_vocab_size:
            raise ValueError(
                f"VocabShard: expected 0 <= start <= stop <= padded_vocab_size, "
                f"got start {self.start}, stop {self.stop}, padded_vocab_size {self.padded_vocab_size}"
            )
        if not 0 <= self.real_vocab_size <= self.padded_vocab_size:
            raise ValueError(
                f"VocabShard: real_vocab_size must lie in [0, padded_vocab_size = {self.padded_vocab_size}], "
                f"got {self.real_vocab_size}"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> VocabShard:
        """Itself: nothing in it changes, and a process group cannot be copied."""
        return self

    @property
    def size(self) -> int:
        """V_local, padding included."""
        return self.stop - self.start

    @property
    def valid(self) -> int:
        """How many of this shard's leading columns are real vocabulary."""
        return min(max(self.real_vocab_size - self.start, 0), self.size)

    @property
    def aligned(self) -> bool:
        """Whether every inner boundary is a multiple of 16, which the contract's bytes need."""
        return all(start % TILE == 0 for start, stop in self.ranges if start > 0 and stop > start)

    @classmethod
    def split(
        cls, real_vocab_size: int, group: ProcessGroup | None = None, *, pad_to_multiple_of: int = 1
    ) -> VocabShard:
        """Even shards, padded to a multiple of lcm(pad_to_multiple_of, 16 W). Collective, as the constructor."""
        rank, world_size = rank_and_size(group)
        error = None
        for name, value, least in (
            ("real_vocab_size", real_vocab_size, 0),
            ("pad_to_multiple_of", pad_to_multiple_of, 1),
        ):
            if not _is_int(value) or value < least:
                error = ValueError(f"VocabShard.split: {name} must be an int of {least} or more, got {value!r}")
        agree.raise_together(error, group)
        unit = math.lcm(pad_to_multiple_of, TILE * world_size)
        padded = -(-real_vocab_size // unit) * unit
        size = padded // world_size
        return cls(rank * size, (rank + 1) * size, real_vocab_size, padded, group)

    @classmethod
    def from_sizes(
        cls, sizes: Sequence[int], group: ProcessGroup | None = None, *, real_vocab_size: int | None = None
    ) -> VocabShard:
        """Shards of the given V_local, one per group rank. All real unless real_vocab_size says otherwise."""
        rank, world_size = rank_and_size(group)
        error = None
        if not isinstance(sizes, Sequence) or len(sizes) != world_size or not all(_is_int(s) and s >= 0 for s in sizes):
            error = ValueError(f"VocabShard.from_sizes: expected {world_size} sizes >= 0, one per rank, got {sizes}")
        agree.raise_together(error, group)
        padded = sum(sizes)
        start = sum(sizes[:rank])
        return cls(start, start + sizes[rank], padded if real_vocab_size is None else real_vocab_size, padded, group)

    @classmethod
    def gather(
        cls, local_size: int, group: ProcessGroup | None = None, *, real_vocab_size: int | None = None
    ) -> VocabShard:
        """Each rank gives its own V_local; ranges are their prefix sums in group-rank order.

        Without real_vocab_size every column counts as real vocabulary: padded weights must say it.
        """
        return cls.from_sizes(gather_objects(local_size, group), group, real_vocab_size=real_vocab_size)

    @classmethod
    def from_dtensor(cls, weight: Tensor, *, real_vocab_size: int | None = None) -> VocabShard:
        """The range of a DTensor [V, ...] with Shard(0) over a one-dimensional DeviceMesh (uneven last shards too)."""
        group = _dtensor_group(weight)
        return cls.gather(weight.to_local().shape[0], group, real_vocab_size=real_vocab_size)  # type: ignore[attr-defined]

    @classmethod
    def of_dtensor(cls, weight: Tensor, *, real_vocab_size: int | None = None) -> VocabShard:
        """`from_dtensor`, made once for each (group, global size, real size)."""
        group, key = _dtensor_group(weight), (weight.shape[0], real_vocab_size)
        shard = _recall(group, key)
        if shard is None:
            shard = cls.from_dtensor(weight, real_vocab_size=real_vocab_size)
            _remember(shard, key)
        return shard

    def agree_first_use(self, described: dict[str, Any], matrix: Tensor) -> None:
        """Once per shard, collective: the ranks agree on what the shard is used for and on not holding one tensor."""
        if self._seen[0] or self.group is None:
            return
        fingerprint = None if agree.is_constant(matrix) else agree.content_hash(matrix)
        everyone = gather_objects((described, fingerprint), self.group)
        agree.compare([d for d, _ in everyone], "every rank of a tensor-parallel group must use the same")
        hashes = [h for _, h in everyone if h is not None]
        if self.world_size > 1 and len(hashes) > 1 and len(set(hashes)) == 1:
            raise ValueError(
                f"every rank holds the same weight {list(matrix.shape)}: expected this rank's shard of the vocabulary, "
                "got the full weight (or the full logits) with a tp_group; pass the columns [shard.start, shard.stop), "
                "or no tp_group"
            )
        self._seen[0] = True


def labelled_shard(label: str) -> VocabShard:
    """The shard of that label; compiled graphs, which hold texts alone, find it by this."""
    shard = _labelled.get(label)
    if shard is None:
        raise ValueError(
            f"{label} that a compiled graph was made with is gone; keep the VocabShard as long as the graph"
        )
    return shard


def _dtensor_group(weight: Tensor) -> Any:
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(weight, DTensor):
        raise TypeError(f"VocabShard.from_dtensor: expected a DTensor, got {type(weight).__name__}")
    mesh = weight.device_mesh
    if mesh.ndim != 1 or list(weight.placements) != [Shard(0)]:
        raise ValueError(
            f"VocabShard.from_dtensor: expected placements [Shard(0)] on a 1-D mesh, got {list(weight.placements)} "
            f"on {mesh}; redistribute the weight or pass its local tensor with tp_group"
        )
    return mesh.get_group()


def _check_cover(ranges: Sequence[tuple[int, int]], padded_vocab_size: int) -> None:
    expected = 0
    for rank, (start, stop) in enumerate(ranges):
        if start != expected:
            kind = "overlap" if start < expected else "leave a gap"
            raise ValueError(
                f"VocabShard: shards {kind}: rank {rank} starts at {start}, expected {expected}; ranges by rank: "
                f"{list(ranges)}"
            )
        expected = stop
    if expected != padded_vocab_size:
        raise ValueError(
            f"VocabShard: shards end at {expected}, expected padded_vocab_size = {padded_vocab_size}; ranges by rank: "
            f"{list(ranges)} (is a full weight given with a group, or a wrong global_vocab_size?)"
        )


# Shards made for calls that gave none. The key holds only what all ranks share, so that a look-up hits on every rank
# or on none: a hit on some would leave the others waiting in the constructor's collective. What is kept does not hold
# the group, or the group would never be freed.
_Facts = dict[str, Any]
_made: weakref.WeakKeyDictionary[Any, dict[tuple[int | None, int | None], _Facts]] = weakref.WeakKeyDictionary()


def known_shard(
    local_size: int, group: Any, vocab_start_index: int | None, global_size: int | None, real_size: int | None
) -> VocabShard | None:
    """The shard of a call that named a group and sizes, or None where the ranks have to make it. Not collective."""
    if group is not None:
        return _recall(group, (global_size, real_size))
    if vocab_start_index not in (None, 0):
        raise ValueError(
            f"vocab_start_index is {vocab_start_index} without a tp_group; a process alone starts at 0 "
            "(pass tp_group or shard)"
        )
    if global_size not in (None, local_size):
        raise ValueError(f"global_vocab_size is {global_size} but {local_size} columns came and no tp_group was given")
    return _alone(local_size, local_size if real_size is None else real_size)


def make_shard(
    local_size: int, group: Any, vocab_start_index: int | None, global_size: int | None, real_size: int | None
) -> VocabShard:
    """Collective, at first use of (group, sizes)."""
    shard = _make(local_size, group, vocab_start_index, global_size, real_size)
    _remember(shard, (global_size, real_size))
    return shard


def _remember(shard: VocabShard, key: tuple[int | None, int | None]) -> None:
    facts = {f.name: getattr(shard, f.name) for f in fields(shard) if f.name not in ("group", "plans")}
    _made.setdefault(shard.group, {})[key] = facts


def _recall(group: Any, key: tuple[int | None, int | None]) -> VocabShard | None:
    facts = _made.get(group, {}).get(key)
    if facts is None:
        return None
    shard = object.__new__(VocabShard)
    shard.__dict__.update(facts, group=group, plans={})
    return shard


@functools.lru_cache(maxsize=64)
def _alone(size: int, real_size: int) -> VocabShard:
    return VocabShard(0, size, real_size, size)


def check_fits(shard: VocabShard, local_size: int, vocab_start_index: int | None) -> None:
    """Raises ValueError for a tensor or a start that is not this shard's."""
    if shard.size != local_size:
        raise ValueError(
            f"this rank's shard is [{shard.start}, {shard.stop}), {shard.size} columns, but {local_size} came; "
            "a group used for several vocabularies needs shard= or global_vocab_size= in each call"
        )
    if vocab_start_index not in (None, shard.start):
        raise ValueError(f"vocab_start_index is {vocab_start_index}, but this rank's shard starts at {shard.start}")


def _make(
    local_size: int, group: Any, vocab_start_index: int | None, global_size: int | None, real_size: int | None
) -> VocabShard:
    rank_and_size(group)
    gathered = gather_objects((local_size, vocab_start_index), group)
    sizes = [size for size, _ in gathered]
    for rank, (_, start) in enumerate(gathered):
        if start is not None and start != sum(sizes[:rank]):
            kind = "overlap" if start < sum(sizes[:rank]) else "leave a gap"
            raise ValueError(
                f"shards {kind}: rank {rank} has vocab_start_index {start}, but the ranks before it hold "
                f"{sum(sizes[:rank])} columns (sizes by rank: {sizes})"
            )
    if global_size is not None and sum(sizes) != global_size:
        raise ValueError(
            f"global_vocab_size is {global_size}, but the ranks hold {sum(sizes)} columns together (sizes by rank: "
            f"{sizes}); is a full weight given with a group?"
        )
    return VocabShard.from_sizes(sizes, group, real_vocab_size=real_size)
