"""An engine's KV tensors as blocks, and copies between them and the pages of a cache group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvmanager.clients.rankmemory import Memory
from kvmanager.clients.vllm.packing import Places
from kvmanager.errors import LayoutMismatch
from kvmanager.layout import KVFormat, KVLayout, plain_format, plain_layout

LIMIT_LAYERS = 10_000


class EngineBlocks:
    """KV tensors [blocks, heads, tokens, content], one a layer, all alike; a page holds one block of each, in order.

    places: where an element of a head's rows lies in its part of a block, int64[tokens * content]; None: row by row.
    Pages are row by row always. Tensors are torch's. On the CPU they are read and written in place, on a GPU by torch's
    current stream.
    """

    def __init__(self, tensors: Mapping[str, Any], places: Places | None = None) -> None:
        """Raises LayoutMismatch for tensors that are not alike, or whose blocks are not one piece."""
        self._places = places
        self._origins = None if places is None else np.argsort(places)
        self._tensors = list(tensors.values())
        if not 1 <= len(self._tensors) <= LIMIT_LAYERS:
            raise LayoutMismatch(f"{len(self._tensors)} KV tensors; 1 to {LIMIT_LAYERS} are served")
        first = self._tensors[0]
        for name, tensor in tensors.items():
            if tensor.dim() != 4 or tensor.shape != first.shape or tensor.dtype != first.dtype:
                raise LayoutMismatch(
                    f"KV tensor {name} is {tuple(tensor.shape)} of {tensor.dtype}, the first {tuple(first.shape)} of "
                    f"{first.dtype}; models whose layers differ are not served"
                )
            if not tensor[0].is_contiguous():
                raise LayoutMismatch(f"KV tensor {name}: a block is not one piece (strides {tensor.stride()})")
        self.blocks, self.heads, self.block_tokens, content = (int(n) for n in first.shape)
        self.format: KVFormat = plain_format(
            str(first.dtype).removeprefix("torch."), len(self._tensors), self.heads, content * first.element_size()
        )
        self.layout: KVLayout = plain_layout(self.format, self.block_tokens)
        self._block_bytes = self.heads * self.block_tokens * content * first.element_size()
        self._element_bytes = int(first.element_size())
        self._on_gpu = bool(first.is_cuda)
        self._views = [] if self._on_gpu else [self._bytes(tensor) for tensor in self._tensors]

    def _bytes(self, tensor: Any) -> Memory:
        """uint8[blocks, block_bytes] of a CPU tensor; no copy."""
        import torch

        flat = tensor.view(torch.uint8).numpy()
        step = flat.strides[0]
        view: Memory = np.lib.stride_tricks.as_strided(flat, (self.blocks, self._block_bytes), (step, 1))
        return view

    def load(self, rows: Memory, pages: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copies pages into blocks; on a GPU it returns when they are there. `rows`: uint8[pages, page_bytes]."""
        for place, (start, stop) in enumerate(self._layers()):
            if self._on_gpu:
                import torch

                tensor = self._tensors[place]
                data = torch.from_numpy(rows[np.asarray(pages), start:stop])
                shaped = data.view(tensor.dtype).view(len(pages), *tensor.shape[1:])
                tensor[torch.as_tensor(block_ids, device=tensor.device)] = shaped.to(tensor.device)
            else:
                self._views[place][np.asarray(block_ids)] = self._packed(rows[np.asarray(pages), start:stop])
        self._wait()

    def save(self, rows: Memory, pages: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copies blocks into pages, and returns when they are there."""
        for place, (start, stop) in enumerate(self._layers()):
            if self._on_gpu:
                import torch

                tensor = self._tensors[place]
                picked = tensor[torch.as_tensor(block_ids, device=tensor.device)].contiguous()
                data = picked.view(torch.uint8).reshape(len(pages), -1).cpu().numpy()
            else:
                data = self._unpacked(self._views[place][np.asarray(block_ids)])
            rows[np.asarray(pages), start:stop] = data

    def _unpacked(self, data: Memory) -> Memory:
        """Blocks of one layer, uint8[blocks, block_bytes], row by row."""
        if self._places is None:
            return data
        elements = self._elements(data)
        unpacked: Memory = np.take(elements, self._places, axis=2).reshape(data.shape[0], -1).view(np.uint8)
        return unpacked

    def _packed(self, data: Memory) -> Memory:
        """The same back."""
        if self._origins is None:
            return data
        packed = np.take(self._elements(data), self._origins, axis=2)  # a fifth of a scatter's time
        back: Memory = packed.reshape(data.shape[0], -1).view(np.uint8)
        return back

    def _elements(self, data: Memory) -> Any:
        """[blocks, heads, tokens * content], each of an element's bytes."""
        width = np.dtype(f"u{self._element_bytes}")
        return np.ascontiguousarray(data).view(width).reshape(len(data), self.heads, -1)

    def _layers(self) -> list[tuple[int, int]]:
        """Bounds of each layer's bytes in a page."""
        return [(n * self._block_bytes, (n + 1) * self._block_bytes) for n in range(len(self._tensors))]

    def _wait(self) -> None:
        if self._on_gpu:
            import torch

            torch.cuda.current_stream().synchronize()
