"""Rows of a matrix that several ranks hold, as torch.distributed.checkpoint saves and loads them.

Torch's DTensor splits a dimension by torch.chunk, and a vocabulary's padding moves the boundaries elsewhere. So this is
a tensor subclass of our own, with the three methods that the checkpoint's planners ask any tensor for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

_LOCALLY = {torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default}


class ReshardableRows(Tensor):
    """Stands for [rows, ...]; `local` [valid, ...] are those from `start` on. It can be detached, cloned and moved."""

    local: Tensor
    start: int

    @staticmethod
    def __new__(cls, local: Tensor, start: int, rows: int) -> ReshardableRows:
        """Of this rank's rows, the first one's index and the number of all."""
        shape = (rows, *local.shape[1:])
        made: ReshardableRows = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        made.local, made.start = local, start
        return made

    def __init__(self, local: Tensor, start: int, rows: int) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        stop = self.start + self.local.shape[0]
        return f"ReshardableRows([{self.start}, {stop}) of {list(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func not in _LOCALLY:
            raise NotImplementedError(f"{func} of rows on several ranks; take .local, this rank's")
        rows = args[0]
        return cls(func(rows.local, *args[1:], **(kwargs or {})), rows.start, rows.shape[0])

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        if not self.local.shape[0]:
            return []
        return [ChunkStorageMetadata(offsets=self._offsets(), sizes=self.local.shape)]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        if index.offset is not None and index.offset != self._offsets():
            raise ValueError(f"{index.fqn}: this rank holds the rows from {self.start} on, not from {index.offset}")
        return self.local

    def _offsets(self) -> torch.Size:
        return torch.Size([self.start] + [0] * (self.local.dim() - 1))
